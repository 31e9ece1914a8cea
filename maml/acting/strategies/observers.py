"""``--strategy observers``: one agent, many observers (torch's tutorial "Batch RPC processing").

In a step of the outer loop, each observer gets the ids of its environments and plays T steps. The
observer requests each action from the agent, and returns its trajectory. The agent differentiates.
The agent answers all requests of a step by one forward pass, or each by its own.
Environments and random draws have addresses, so the parameters are those of ``local``, batched or
not, for any number of observers, as long as no observer is lost.
"""

import math
import queue
import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.environments.acting import Trajectory, play
from maml.acting.learners.reinforce import Reinforce, as_played
from maml.config import Config
from maml.errors import UserError
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import Answer, Arrival, Order, OverRpc, on_strategy
from maml.worker import Batch, Share, Worker

COMPONENTS = {
    "observers": {
        "attribute": "Observers",
        "help": "rank 0 is the agent, the others act in environments and ask it for actions",
        "reads": ("rpc_threads", "batched_inference", "batch_wait"),
    }
}


class Request(NamedTuple):
    """An observer's observations and draws ``[n, O + D]``, and the future of their actions."""

    rank: int
    rows: Tensor
    answer: Answer


class Observers(OverRpc):
    """The agent on rank 0, an observer on each other rank.

    The agent's main thread gathers one request of each observer, and answers all of them by one
    forward pass. After ``--batch-wait`` seconds it answers an incomplete batch. With
    ``--batched-inference false`` it answers each request at once.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        if not isinstance(worker.learner, Reinforce):
            raise UserError(
                f"--strategy observers: they play for --learner reinforce, not {config.learner}"
            )
        if world.size == 1:
            raise UserError("--strategy observers: needs 2 processes: an agent and an observer")
        if worker.learner.plan.draws:
            raise UserError(
                "--strategy observers: the agent acts for all tasks at once, and the network's "
                "random draws belong to a task; give --strategy rpc"
            )
        self.learner = worker.learner
        self.computing = range(1)
        self.spared = len(self.others) - 1
        # The ranks that still play in this step, and their policy.
        self._playing = set[int]()
        self._policy: Params = {}
        # When to give up, the requests of the current batch by rank, and when the first came.
        self._deadline = math.inf
        self._asked: dict[int, Request] = {}
        self._since = 0.0
        self._played = torch.empty(0, dtype=torch.int64)
        self._counts = Counter[str]()
        # Seconds of acting, and how long each request waited for its actions.
        self._acting, self._waits = 0.0, list[Tensor]()

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Let each observer play a part of ``ids``; differentiate what observers return."""
        phase = self.learner.phase(int(ids[0]) // self.config.meta_batch_size)
        problem = self.learner.stated(meta_params, phase)
        there = [rank for rank in self.others if rank not in self.gone]
        split = ids.tensor_split(len(there)) if there else []
        parts = {rank: part for rank, part in zip(there, split, strict=True) if len(part)}
        plays = self.play(problem.params(problem.start, 0), parts)
        # In the order of ids, not of arrival, so that a repeated run has the same bits.
        self._played = torch.cat([part for (_, part), _ in plays])
        self._counts["missed_tasks"] += len(ids) - len(self._played)
        joined = pytree.tree_map(lambda *of: torch.cat(of), *(played for _, (played, _) in plays))
        self._waits += [waits for _, (_, waits) in plays]
        made = Batch(phase, as_played(joined), self._played)
        return self.worker.share_of(meta_params, [made], self.learner)

    def play(self, policy: Params, parts: dict[int, Tensor]) -> list[tuple[Order, Any]]:
        """Let ranks play ``parts``; return orders and results, without those of lost observers."""
        began = self.liveness.clock.now()
        # Longer than `Liveness` waits before it gives a silent observer up.
        self._deadline = began + 2 * self.config.timeout
        self._playing, self._policy = set(parts), policy
        orders = {rank: (Observers.observe, part) for rank, part in parts.items()}
        results = self.collect(
            lambda rank: orders.pop(rank, None), lambda _: self._playing <= self.gone
        )
        if not results:
            raise self.liveness.explain(RuntimeError("no observer is left"))
        self._acting += self.liveness.clock.now() - began
        return list(results.values())

    def take(self) -> Arrival | None:
        """Answer a batch of requests if it is due; else return what the next observer brings."""
        now = self.liveness.clock.now()
        missing = self._playing - self.gone
        batched = self.config.batched_inference == "true"
        complete = missing <= self._asked.keys() if batched else bool(self._asked)
        due = self._since + self.config.batch_wait - now if self._asked else math.inf
        if self._asked and (complete or due <= 0):
            self._counts["flushed"] += not complete
            self._act()
        elif now > self._deadline:
            raise self.liveness.explain(TimeoutError(self.liveness.members.name(missing)))
        else:
            # Wait in short pieces, because another thread notes which observers are lost.
            with suppress(queue.Empty):
                arrival = self.arrivals.get(timeout=min(0.2, due))
                if isinstance(arrival, Arrival):
                    if arrival.result is not None:
                        self._playing.discard(arrival.rank)
                    return arrival
                self._since = self._since if self._asked else self.liveness.clock.now()
                self._asked[arrival.rank] = arrival
        return None

    def _act(self) -> None:
        """Answer the requests of a batch."""
        # In the order of ranks, not of arrival, so that a repeated run has the same bits.
        requests, self._asked = [self._asked[rank] for rank in sorted(self._asked)], {}
        rows = torch.cat([request.rows for request in requests])
        observations, draws = rows.tensor_split([self.learner.environment.observation_size], 1)
        with torch.no_grad():
            actions = self.learner.actions(self._policy, observations.to(self.worker.dtype), draws)
        parts = actions.split([len(request.rows) for request in requests])
        for request, part in zip(requests, parts, strict=True):
            request.answer.set_result(part)
        self._counts.update(forwards=1, requests=len(requests))

    def ask(self, rank: int, rows: Tensor) -> Answer:
        """On the agent: return the future of the actions for one request."""
        answer: Answer = torch.futures.Future()
        self.arrivals.put(Request(rank, rows, answer))
        return answer

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return the ids that were played."""
        return self._played

    def report(self) -> dict[str, Any]:
        """Return counts of forward passes, requests, incomplete batches and tasks not played; the
        requests answered in a second of acting; percentiles of an action's time in ms.
        """
        counts, self._counts = self._counts, Counter()
        row = super().report() | {n: counts[n] for n in ("forwards", "requests", "flushed")}
        if self._waits:
            row["requests_per_second"] = counts["requests"] / self._acting
            waits = 1e3 * torch.cat(self._waits)
            row["action_ms"] = {f"p{n}": float(waits.quantile(n / 100)) for n in (50, 95)}
            self._acting, self._waits = 0.0, []
        missed = {"missed_tasks": counts["missed_tasks"]} if counts["missed_tasks"] else {}
        return row | missed

    def observe(self, ids: Tensor) -> tuple[Trajectory, Tensor]:
        """On an observer: play the tasks ``ids``: `Trajectory` of ``[B, Q, T, …]``; also return the
        seconds ``[T]`` from each request to its actions.
        """
        tasks, waits = self.worker.training.tasks(ids), list[float]()

        def choose(observations: Tensor, draws: Tensor) -> Tensor:
            request = torch.cat([observations, draws], dim=-1).flatten(0, -2)
            began = time.perf_counter()
            with self.liveness.guard():
                asked = (Observers.ask, self.world.rank, request)
                actions = rpc.rpc_sync(0, on_strategy, asked)
            waits.append(time.perf_counter() - began)
            return actions.view(*observations.shape[:-1], *actions.shape[1:])

        environment, dtype = self.learner.environment, self.worker.dtype
        played = play(environment, tasks.query_x, tasks.query_y, choose, dtype)
        return played, torch.tensor(waits)
