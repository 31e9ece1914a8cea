"""``--strategy param-server`` over RPC: rank 0 serves, the others train.

One RPC pushes a gradient and returns the next order with the updated model. As in PyTorch's
tutorial on asynchronous execution, a push frees its thread at once; its answer is a future that the
server resolves later. Only the server's main thread decides: `ParameterServer.meta_step` chooses
what to wait for, drop or sum. The outer loop chooses when to step, as for every strategy.
"""

import functools
import queue
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from maml.config import Config
from maml.errors import UserError
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import OverRpc, answer_later
from maml.worker import Share, Worker


class Order(NamedTuple):
    """The server's order to a trainer: compute the tasks ``ids [T]`` next, for a step.

    ``params [P]`` is the step's model, flat; empty if the model stays on the server.
    """

    step: int
    ids: Tensor
    params: Tensor


class Result(NamedTuple):
    """The result of an order: its step, a packed share, and the bytes sent for this result."""

    step: int
    flat: Tensor
    wire_bytes: int


class Event(NamedTuple):
    """An arrival from ``rank``. ``answer``: the future of the order that it waits for, if any.

    None in place of an order tells the trainer to leave.
    """

    rank: int
    result: Result | None
    answer: Future[Order | None] | None


class ParameterServer(OverRpc):
    """The server on rank 0, and a trainer on each other rank.

    Modes (``--ps-mode``): sync sums the gradients of all trainers. backup sums the first n − b
    gradients that arrive. async returns each gradient as it arrives, unless it is too old. A
    gradient carries the step number of its model and the count of its tasks. So the outer loop
    divides by the number of tasks that were really summed.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.spared = config.ps_backup_workers if config.ps_mode == "backup" else 0
        if self.spared >= len(self.others):
            raise UserError(
                f"--ps-backup-workers {self.spared}: a step would wait for none of the "
                f"{len(self.others)} trainers"
            )
        self.computing = self.others
        # RPC's threads put arrivals in; the main thread takes them out.
        self.events = queue.SimpleQueue[Event]()
        self._closing = threading.Lock()
        self._idle: dict[int, Future[Order | None]] = {}
        self._step = 0
        # async: the first meta-batch, the number of meta-batches handed out, each rank's latest.
        self._first_ids: Tensor | None = None
        self._handed_out = 0
        self._under_way: dict[int, Tensor] = {}
        self._taken_in = torch.empty(0, dtype=torch.int64)
        self._forget_counts()

    def exchange(self, rank: int, result: Result | None) -> Future[Order | None]:
        """On the server: take in ``result``, if any; return the future of the next order."""
        answer: Future[Order | None] = Future()
        with self._closing:
            if self.finished.is_set():
                answer.set_result(None)
            else:
                self.events.put(Event(rank, result, answer))
        return answer

    def part_size(self, rank: int) -> int:
        """Return the size of a trainer's part: in async mode, a whole meta-batch."""
        of_all = self.config.ps_mode == "async"
        return self.config.meta_batch_size if of_all else super().part_size(rank)

    def counts(self, rank: int) -> bool:
        """Return whether a lost trainer counts: in backup mode, only one with tasks does."""
        return self.config.ps_mode != "backup" or self.part_size(rank) > 0

    def publish(self, meta_params: Params) -> Tensor:
        """Begin a step with this model; return the ``params`` of its orders."""
        return self.packing.params(meta_params)

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Hand out the model and task ids; return the gradients that this mode waits for.

        In async mode, return the first gradient that arrives. There each trainer gets a whole
        meta-batch, so that a step is the mean over as many tasks as in every other mode.
        """
        began, self._waited = time.monotonic(), 0.0
        self._step += 1
        params = self.publish(meta_params)
        if self.config.ps_mode == "async":
            flat = self._first_to_arrive(params, ids)
        else:
            flat = self._sum_of_step(params, ids)
        self._busy += time.monotonic() - began - self._waited
        return self.packing.to_share(flat)

    def _sum_of_step(self, params: Tensor, ids: Tensor) -> Tensor:
        """Return the sum over the first n − b trainers' shares of this step."""
        parts = dict(zip(self.others, ids.tensor_split(len(self.others)), strict=True))
        # With fewer tasks than trainers, some trainers get no order, and we do not wait for them.
        callers = {rank for rank, part in parts.items() if len(part)}
        shares: dict[int, Tensor] = {}
        asked: set[int] = set()
        while len(shares) < max(len(callers) - self.spared, 1):
            for rank in sorted((self._idle.keys() & callers) - asked):
                self._give(rank, parts[rank], params)
                asked.add(rank)
            rank, result, _ = self._take()
            if result is not None and result.step == self._step:
                shares[rank] = result.flat
            elif result is not None:
                self._dropped += 1
        # Sum in the order of ranks, not of arrival, so that a repeated run has the same bits.
        ranks = sorted(shares)
        self._taken_in = torch.cat([parts[rank] for rank in ranks])
        return functools.reduce(torch.add, (shares[rank] for rank in ranks))

    def _first_to_arrive(self, params: Tensor, ids: Tensor) -> Tensor:
        """Return the first share that is not more than ``--ps-max-staleness`` steps behind."""
        if self._first_ids is None:
            self._first_ids = ids
        while True:
            for rank in sorted(self._idle):
                batch = self._first_ids + self._handed_out * len(ids)  # as `Episodes.ids` counts
                self._handed_out += 1
                self._under_way[rank] = batch
                self._give(rank, batch, params)
            rank, result, _ = self._take()
            if result is None:
                continue
            self._taken_in = self._under_way.pop(rank)
            staleness = self._step - result.step
            if staleness <= self.config.ps_max_staleness:
                self._staleness[staleness] += 1
                return result.flat
            self._dropped += 1

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return the ids of the gradients that this step took in."""
        return self._taken_in

    def _take(self) -> Event:
        """Return and count the next arrival of any rank."""
        began = time.monotonic()
        with self.guard():
            event = self.events.get()
        self._waited += time.monotonic() - began
        if event.answer is not None:
            self._idle[event.rank] = event.answer
        if event.result is not None:
            self.wire_bytes += event.result.wire_bytes
        return event

    def _give(self, rank: int, ids: Tensor, params: Tensor) -> None:
        """Send an order to ``rank``, which waits for it."""
        self.wire_bytes += ids.nbytes + params.nbytes
        self._idle.pop(rank).set_result(Order(self._step, ids, params))

    def _forget_counts(self) -> None:
        self._dropped, self._busy, self._waited = 0, 0.0, 0.0
        self._staleness = Counter[int]()

    def report(self) -> dict[str, Any]:
        """Return bytes, the server's busy seconds, dropped gradients, and staleness by age."""
        row = super().report() | {"server_seconds": self._busy}
        if self.config.ps_mode != "sync":
            row["dropped"] = self._dropped
        if self.config.ps_mode == "async":
            oldest = max(self._staleness, default=0)
            row["staleness"] = [self._staleness[age] for age in range(oldest + 1)]
        self._forget_counts()
        return row

    def send_home(self) -> None:
        """Tell all trainers to leave: those that wait for an order, and those that come later."""
        with self._closing:
            self.finished.set()
        answers: list[Future[Order | None] | None] = [*self._idle.values()]
        while not self.events.empty():
            answers.append(self.events.get().answer)
        for answer in answers:
            if answer is not None:
                answer.set_result(None)

    def serve(self) -> None:
        """Do what the server orders, until the server announces that all is done."""
        self.stop.install()
        order = self._next_order(None)
        while order is not None:
            order = self._next_order(self.compute(order))

    def compute(self, order: Order) -> Result | None:
        """Compute the share of an order; return the result, or None if it is already delivered."""
        flat = self.packed_share(order.ids, order.params)
        return Result(order.step, flat, flat.nbytes)

    def _next_order(self, result: Result | None) -> Order | None:
        """Push the ``result``; wait for the next order while the server lives."""
        arrived = threading.Event()
        given = (ParameterServer.exchange, self.world.rank, result)
        answer = rpc.rpc_async(0, answer_later, given)
        answer.then(lambda _: arrived.set())
        self.wait_for(arrived)
        with self.guard():
            order: Order | None = answer.wait()
        return order
