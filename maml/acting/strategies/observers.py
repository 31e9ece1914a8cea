"""``--strategy observers``: one agent, many observers (torch's tutorial "Batch RPC processing").

A step of the outer loop: each observer gets the ids of its environments, plays T steps in them,
asks the agent for each action, and returns what it saw and did. The agent differentiates. What an
observer meets, and what is drawn, has addresses; so the parameters are those of ``local``, batched
or not, however many observers there are, as long as none of them is lost.
"""

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from datasets.environments.acting import Trajectory, play
from maml.acting.learners.reinforce import Reinforce, as_played
from maml.acting.strategies.inference import Batches, Inference
from maml.config import Config
from maml.errors import UserError
from maml.params import Params
from maml.processes.world import World
from maml.strategies.gathering import Answer
from maml.strategies.over_rpc import OverRpc, reported, this
from maml.worker import Batch, Share, Worker

COMPONENTS = {
    "observers": {
        "attribute": "Observers",
        "help": "rank 0 is the agent, the others act in environments and ask it for actions",
        "reads": ("rpc_threads", "batch_wait"),
    }
}

LATE = 5.0
"""Seconds that an observer may always take, once another one is done."""


class _Late(Exception):
    """The agent has gone on without this observer."""


@rpc.functions.async_execution
def _answer(number: int, rank: int, request: Tensor) -> Answer:
    """Run on the agent: the actions of one request; none, of a step that is over."""
    agent = this(Observers)
    if number == agent.number:
        return agent.batches.ask(rank, request)
    late: Answer = torch.futures.Future()
    late.set_result(torch.empty(0))
    return late


@reported
def _observe(number: int, ids: Tensor) -> Trajectory | None:
    """Run on an observer: play the tasks ``ids``; None if the agent does not wait for it."""
    try:
        return this(Observers).observe(number, ids)
    except _Late:
        return None


class Observers(OverRpc):
    """The agent on rank 0, an observer on each other; ``number`` is the step under way."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        if not isinstance(worker.learner, Reinforce):
            raise UserError(
                f"--strategy observers: they play for --learner reinforce, not {config.learner}"
            )
        if world.size == 1:
            raise UserError("--strategy observers: needs 2 processes: an agent, and who observes")
        self.learner = worker.learner
        self.computing = range(1)
        self.number = 0
        self.spared = len(self.others) - 1
        # The calls that are under way, with the step that each is of.
        self._calls: dict[int, tuple[int, torch.futures.Future[Any]]] = {}
        self._news = threading.Event()
        self._played = torch.empty(0, dtype=torch.int64)
        self._missed, self._acting = 0, 0.0

    def get_ready(self) -> None:
        """Be the agent, or an observer with its environment."""
        if self.drives:
            self.inference = Inference(self.learner)
            self.batches = Batches(self.inference, self.config.batch_wait)

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Let all observers play their part of ``ids``; differentiate what has come back."""
        self.number += 1
        self.inference.follow(meta_params)
        began = time.monotonic()
        free = self._free()
        parts = dict(zip(free, ids.tensor_split(len(free)), strict=True))
        parts = {rank: part for rank, part in parts.items() if len(part)}
        self.batches.begin(parts)
        for rank, part in parts.items():
            self._call(rank, part)
        found = self._gather(set(parts))
        # An observer that asks from here on is told that this step is over.
        self.batches.begin(())
        self._acting += time.monotonic() - began
        # In the order of ids, not of arrival: a repeated run has the same bits.
        ranks = [rank for rank in parts if rank in found]
        self._played = torch.cat([parts[rank] for rank in ranks])
        self._missed += len(ids) - len(self._played)
        joined = Trajectory(
            *(torch.cat(part) for part in zip(*(found[rank] for rank in ranks), strict=True))
        )
        made = Batch(self.learner.last_phase, as_played(joined), self._played)
        return self.worker.share_of(meta_params, [made], self.learner)

    def _free(self) -> list[int]:
        """Return the observers that are not late; wait for one that is, if all are."""
        deadline = self.liveness.clock.now() + self.config.timeout
        while True:
            self._take()
            free = [rank for rank in self.others if rank not in self.gone | self._calls.keys()]
            if free:
                return free
            if self.liveness.clock.now() >= deadline or not self._calls:
                names = self.liveness.name(self.others)
                raise self.liveness.explain(TimeoutError(f"no observer is left of {names}"))
            self._wait(0.2)

    def _call(self, rank: int, part: Tensor) -> None:
        try:
            # 0: no time limit of its own; `_gather` has one.
            call = rpc.rpc_async(rank, _observe, (self.number, part), timeout=0)
        except RuntimeError:
            self._lose(rank)
            return
        self._calls[rank] = self.number, call
        call.add_done_callback(lambda _: self._news.set())

    def _gather(self, playing: set[int]) -> dict[int, Trajectory]:
        """Return what observers have played: of all, but for those that are lost or late."""
        clock, found = self.liveness.clock, dict[int, Trajectory]()
        began = clock.now()
        deadline = began + self.config.timeout
        while missing := playing - found.keys() - self.gone:
            now = clock.now()
            for rank, played in self._take().items():
                if not found:
                    deadline = min(deadline, now + max(LATE, 3 * (now - began)))
                found[rank] = played
                self.wire_bytes += sum(part.nbytes for part in played)
            missing -= found.keys()
            if missing and now >= deadline:
                if not found:
                    raise self.liveness.explain(TimeoutError(self.liveness.name(missing)))
                line = f"{self.liveness.name(missing)} late; step {self.number} goes on without"
                print(line, file=sys.stderr, flush=True)
                break
            if missing:  # in pieces: who is lost is said by another thread
                self._wait(min(0.2, deadline - now))
        if not found:
            raise self.liveness.explain(RuntimeError("no observer is left"))
        return found

    def _wait(self, seconds: float) -> None:
        self._news.wait(seconds)
        self._news.clear()

    def _take(self) -> dict[int, Trajectory]:
        """Return what ended calls of this step have played; who has failed is lost."""
        found = {}
        for rank, (number, call) in list(self._calls.items()):
            if not call.done():
                continue
            del self._calls[rank]
            self.batches.leave(rank)
            try:
                what = call.value()
            except Exception:
                self._lose(rank)
                continue
            if number == self.number and what is not None:
                found[rank] = what
        return found

    def _lose(self, rank: int) -> None:
        self.batches.leave(rank)
        self.gone.add(rank)

    def survives(self, rank: int, line: str) -> bool:
        """Ask no more for an observer that was lost."""
        self.batches.leave(rank)
        return super().survives(rank, line)

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return those that were played."""
        return self._played

    def report(self) -> dict[str, Any]:
        """Forward passes and requests, incomplete batches, tasks not played."""
        inference = self.inference
        row = super().report() | {
            "forwards": inference.forwards,
            "requests": inference.requests,
            "requests_per_second": inference.requests / self._acting if self._acting else 0.0,
            "flushed": self.batches.flushed,
        }
        if self._missed:
            row["missed_tasks"] = self._missed
        inference.forget()
        self.batches.flushed, self._missed, self._acting = 0, 0, 0.0
        return row

    def observe(self, number: int, ids: Tensor) -> Trajectory:
        """Play the tasks ``ids``: `Trajectory` of ``[B, Q, T, …]``."""
        tasks = self.worker.training.tasks(ids)

        def choose(observations: Tensor, draws: Tensor) -> Tensor:
            request = torch.cat([observations, draws], dim=-1).flatten(0, -2)
            with self.guard():
                actions = rpc.rpc_sync(0, _answer, (number, self.world.rank, request))
            if not actions.numel():
                raise _Late
            return actions.view(*observations.shape[:-1], *actions.shape[1:])

        environment, dtype = self.learner.environment, self.worker.dtype
        return play(environment, tasks.query_x, tasks.query_y, choose, dtype)
