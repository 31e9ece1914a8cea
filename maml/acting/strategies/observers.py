"""``--strategy observers``: one agent, many observers (torch's tutorial "Batch RPC processing").

In a step of the outer loop, each observer gets the ids of its environments and plays T steps. The
observer requests each action from the agent, and returns its trajectory. The agent differentiates.
Environments and random draws have addresses, so the parameters are those of ``local``, batched or
not, for any number of observers, as long as no observer is lost or late.
"""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from datasets.environments.acting import Trajectory, play
from maml.acting.learners.reinforce import Reinforce, as_played
from maml.config import Config
from maml.errors import UserError
from maml.learners import build_learner
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import Answer, OverRpc, answer_all, reported, this
from maml.worker import Batch, Share, Worker

COMPONENTS = {
    "observers": {
        "attribute": "Observers",
        "help": "rank 0 is the agent, the others act in environments and ask it for actions",
        "reads": ("rpc_threads", "batch_wait"),
    }
}

LATE = 5.0
"""Seconds that every observer may still take after the first one is done."""


class Inference:
    """The policy of one training step, for any thread. Counts ``forwards`` and ``requests``."""

    def __init__(self, learner: Reinforce) -> None:
        # Another one, because a call of the learner's network swaps the network's tensors.
        self._learner = cast("Reinforce", build_learner(learner.config))
        self._params: Params = {}
        self._seen = learner.environment.observation_size
        self.forwards, self.requests = 0, 0

    def follow(self, meta_params: Params, phase: int = 0) -> None:
        """Answer as the problem of ``phase`` states from here on. No request may be in progress."""
        problem = self._learner.stated(meta_params, phase)
        params = problem.params(problem.start, 0)
        # Copies, because the outer optimizer changes its own in place.
        self._params = {name: tensor.detach().clone() for name, tensor in params.items()}

    @torch.no_grad()
    def __call__(self, requests: list[Tensor]) -> list[Tensor]:
        """Return actions for requests ``[n, O + D]`` (observations, draws), by one forward pass."""
        rows = torch.cat(requests)
        observations, draws = rows[:, : self._seen], rows[:, self._seen :]
        dtype = next(iter(self._params.values())).dtype
        actions = self._learner.actions(self._params, observations.to(dtype), draws)
        self.forwards += 1
        self.requests += len(requests)
        return list(actions.split([len(request) for request in requests]))


class Batches:
    """Gather one request of each observer. The last request triggers the answers to all.

    An incomplete batch is answered after ``wait`` seconds; ``flushed`` counts these batches.
    """

    def __init__(self, inference: Callable[[list[Tensor]], list[Tensor]], wait: float) -> None:
        self._inference, self._wait = inference, wait
        self._changed = threading.Condition()
        self._playing: set[int] = set()
        self._asked: dict[int, tuple[Tensor, Answer]] = {}
        self._since = 0.0
        self.flushed = 0
        threading.Thread(target=self._flush, name="batches", daemon=True).start()

    def begin(self, ranks: Iterable[int]) -> None:
        """Expect requests of these observers."""
        with self._changed:
            self._playing = set(ranks)

    def leave(self, rank: int) -> None:
        """Expect no more requests of an observer."""
        with self._changed:
            self._playing.discard(rank)
            batch = self._take_if_complete()
        self._answer(batch)

    def ask(self, rank: int, request: Tensor) -> Answer:
        """Return a future of the answer, so that no thread has to wait."""
        answer: Answer = torch.futures.Future()
        with self._changed:
            if not self._asked:
                self._since = time.monotonic()
                self._changed.notify()
            self._asked[rank] = request, answer
            batch = self._take_if_complete()
        self._answer(batch)
        return answer

    def _take_if_complete(self, *, late: bool = False) -> dict[int, tuple[Tensor, Answer]]:
        if len(self._asked) < len(self._playing) and not late:
            return {}
        batch, self._asked = self._asked, {}
        return batch

    def _answer(self, batch: dict[int, tuple[Tensor, Answer]]) -> None:
        if batch:
            # In the order of ranks, not of arrival, so that a repeated run has the same bits.
            requests, answers = zip(*(batch[rank] for rank in sorted(batch)), strict=True)
            answer_all(answers, lambda: self._inference(list(requests)))

    def _flush(self) -> None:
        while True:
            with self._changed:
                left = self._since + self._wait - time.monotonic() if self._asked else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                batch = self._take_if_complete(late=True)
                self.flushed += 1
            self._answer(batch)


class _Late(Exception):
    """The agent has gone on without this observer."""


@rpc.functions.async_execution
def _answer(number: int, rank: int, request: Tensor) -> Answer:
    """Run on the agent: return the actions for one request; none if its step is over."""
    agent = this(Observers)
    if number == agent.number:
        return agent.batches.ask(rank, request)
    late: Answer = torch.futures.Future()
    late.set_result(torch.empty(0))
    return late


@reported
def _observe(number: int, ids: Tensor) -> Trajectory | None:
    """Run on an observer: play the tasks ``ids``; None if the agent has gone on without it."""
    with contextlib.suppress(_Late):
        return this(Observers).observe(number, ids)
    return None


class Observers(OverRpc):
    """The agent on rank 0, an observer on each other rank; ``number`` is the current step."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        if not isinstance(worker.learner, Reinforce):
            raise UserError(
                f"--strategy observers: they play for --learner reinforce, not {config.learner}"
            )
        if world.size == 1:
            raise UserError("--strategy observers: needs 2 processes: an agent and an observer")
        if worker.learner.draws:
            raise UserError(
                "--strategy observers: the agent acts for all tasks at once, and the network's "
                "random draws belong to a task; give --strategy rpc"
            )
        self.learner = worker.learner
        self.computing = range(1)
        self.number = 0
        self.spared = len(self.others) - 1
        # The ranks that are playing, and the calls that have ended: (rank, step, call).
        self._busy: set[int] = set()
        self._ended = queue.SimpleQueue[tuple[int, int, torch.futures.Future[Any]]]()
        self._played = torch.empty(0, dtype=torch.int64)
        self._missed = 0
        if self.drives:
            self.inference = Inference(self.learner)
            self.batches = Batches(reported(self.inference), config.batch_wait)

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Let each free observer play a part of ``ids``; differentiate what observers return."""
        self.number += 1
        phase = self.learner.phase(int(ids[0]) // self.config.meta_batch_size)
        self.inference.follow(meta_params, phase)
        free = self._free()
        parts = dict(zip(free, ids.tensor_split(len(free)), strict=True))
        parts = {rank: part for rank, part in parts.items() if len(part)}
        self.batches.begin(parts)
        for rank, part in parts.items():
            self._call(rank, part)
        found = self._gather(set(parts))
        # From here on no batch waits for others: a late request is answered at once.
        self.batches.begin(())
        # In the order of ids, not of arrival, so that a repeated run has the same bits.
        ranks = [rank for rank in parts if rank in found]
        self._played = torch.cat([parts[rank] for rank in ranks])
        self._missed += len(ids) - len(self._played)
        joined = Trajectory(
            *(torch.cat(part) for part in zip(*(found[rank] for rank in ranks), strict=True))
        )
        made = Batch(phase, as_played(joined), self._played)
        return self.worker.share_of(meta_params, [made], self.learner)

    def _free(self) -> list[int]:
        """Return the observers that are free. If all are still busy, wait until one is free."""
        deadline = self.liveness.clock.now() + self.config.timeout
        while not self._ended.empty():
            self._next(0)
        while not (free := [n for n in self.others if n not in self.gone | self._busy]):
            if self.liveness.clock.now() >= deadline or not self._busy:
                names = self.liveness.name(self.others)
                raise self.liveness.explain(TimeoutError(f"no observer is left of {names}"))
            self._next(0.2)
        return free

    def _call(self, rank: int, part: Tensor) -> None:
        number = self.number
        try:
            # 0: the call has no time limit, because `_gather` has one.
            call = rpc.rpc_async(rank, _observe, (number, part), timeout=0)
        except RuntimeError:
            self.batches.leave(rank)
            self.gone.add(rank)
            return
        self._busy.add(rank)
        call.add_done_callback(lambda call: self._ended.put((rank, number, call)))

    def _gather(self, playing: set[int]) -> dict[int, Trajectory]:
        """Return each observer's trajectory by rank, without lost and late observers."""
        clock, found = self.liveness.clock, dict[int, Trajectory]()
        began = clock.now()
        deadline = began + self.config.timeout
        while missing := playing - found.keys() - self.gone:
            left = deadline - clock.now()
            # Wait in short pieces, because another thread notes which observers are lost.
            rank, played = self._next(min(0.2, max(left, 0.0)))
            if played is not None:
                if not found:
                    now = clock.now()
                    deadline = min(deadline, now + max(LATE, 3 * (now - began)))
                found[rank] = played
                self.wire_bytes += sum(part.nbytes for part in played)
            elif left <= 0 and self._ended.empty():
                if not found:
                    raise self.liveness.explain(TimeoutError(self.liveness.name(missing)))
                line = f"{self.liveness.name(missing)} late; step {self.number} goes on without"
                print(line, file=sys.stderr, flush=True)
                break
        if not found:
            raise self.liveness.explain(RuntimeError("no observer is left"))
        return found

    def _next(self, seconds: float) -> tuple[int, Trajectory | None]:
        """Wait for a call to end. Return its rank, and its trajectory if it is of this step."""
        try:
            rank, number, call = self._ended.get(timeout=seconds)
        except queue.Empty:
            return 0, None
        self._busy.discard(rank)
        self.batches.leave(rank)
        try:
            played = call.value()
        except Exception:  # a failed observer is lost
            self.gone.add(rank)
            return rank, None
        return rank, played if number == self.number else None

    def survives(self, rank: int, line: str) -> bool:
        """Expect no more requests of a lost observer; see `OverRpc.survives`."""
        self.batches.leave(rank)
        return super().survives(rank, line)

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return the ids that were played."""
        return self._played

    def report(self) -> dict[str, Any]:
        """Return counts of forward passes, requests, incomplete batches and tasks not played."""
        inference = self.inference
        row = super().report() | {
            "forwards": inference.forwards,
            "requests": inference.requests,
            "flushed": self.batches.flushed,
        }
        if self._missed:
            row["missed_tasks"] = self._missed
        inference.forwards, inference.requests = 0, 0
        self.batches.flushed, self._missed = 0, 0
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
