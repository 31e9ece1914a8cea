"""``--strategy param-server`` over RPC: rank 0 serves, the others train.

One RPC pushes a gradient and returns the next order with the updated model. The server's main
thread alone decides: what it waits for, drops or sums is `ParameterServer.meta_step`; when to
step is the outer loop's business, as for every strategy.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from maml.config import Config
from maml.errors import UserError, WorkerLostError
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import OverRpc, this
from maml.strategies.packing import Packing
from maml.strategies.param_server.inbox import Inbox
from maml.strategies.param_server.messages import Order, Result
from maml.strategies.param_server.remote_forward import Caller, ServedModel
from maml.worker import Share, Worker


@rpc.functions.async_execution
def _exchange(rank: int, result: Result | None) -> Future[Order]:
    """Run on the server: push a result, get the next order; holds no thread meanwhile."""
    return this(ParameterServer).inbox.exchange(rank, result)


class ParameterServer(OverRpc):
    """The server and, on the other ranks, a trainer.

    Modes (``--ps-mode``): sync sums the gradients of all trainers; backup those of the first
    n − b that arrive; async returns each gradient as it arrives, unless it is too old. A gradient
    carries the number of the step whose model it was computed with, and the count of its tasks:
    the outer loop divides by the tasks that were summed, whichever they were.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        if not self.others:
            raise UserError("--strategy param-server: needs 2 processes: one serves, others train")
        self._spared = config.ps_backup_workers if config.ps_mode == "backup" else 0
        if self._spared >= len(self.others):
            raise UserError(
                f"--ps-backup-workers {self._spared}: a step would wait for none of the "
                f"{len(self.others)} trainers"
            )
        self.packing = Packing(worker.learner.meta_parameters(), len(worker.metric_names))
        self.liveness.survives = self._survives
        self.inbox = Inbox()
        self._served: ServedModel | None = None
        self._idle: set[int] = set()
        self._backlog: deque[tuple[int, Result]] = deque()
        self._step = 0
        self._evaluations = 0
        # A trainer's latest tasks.
        self._latest = torch.empty(0, dtype=torch.int64)
        self._handed_out = 0
        self._first_ids: Tensor | None = None
        # async: meta-batches that were handed out and not taken in, of each rank in their order;
        # and those of a run that was stopped.
        self._under_way: dict[int, deque[Tensor]] = {rank: deque() for rank in self.others}
        self._left_over: deque[Tensor] = deque()
        self._taken_in = torch.empty(0, dtype=torch.int64)
        self._forget_counts()

    def get_ready(self) -> None:
        """Serve the model, where trainers call it on the server."""
        if self.drives and self.config.ps_forward == "remote":
            self._served = ServedModel(
                self.worker,
                self.inbox,
                self.others,
                of_its_order=self.config.ps_mode != "async",
            )

    def share_sizes(self) -> set[int]:
        """Where the model is called, the parts of all trainers who call it there."""
        if self.drives != (self.config.ps_forward == "remote"):
            return set()
        if self.config.ps_mode == "async":
            return {self.config.meta_batch_size}
        callers = self.others if self.drives else [self.world.rank]
        return {self.part_size(rank - 1, len(self.others)) for rank in callers}

    # ---- the server -------------------------------------------------------------------------

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Hand out the model and task ids; return the gradients that this mode waits for.

        In async mode the tasks are those of the first gradient to arrive: a trainer gets a whole
        meta-batch, so that a step is the mean over as many tasks as in every other mode.
        """
        began, self._waited = time.monotonic(), 0.0
        self._step += 1
        params = torch.empty(0)
        if self._served is not None:
            self._served.publish(self._step, meta_params)
        else:
            params = self.packing.params(meta_params)
        if self.config.ps_mode == "async":
            flat = self._first_to_arrive(params, ids)
        else:
            flat = self._sum_of_step(params, ids)
        self._busy += time.monotonic() - began - self._waited
        return self.packing.to_share(flat)

    def _sum_of_step(self, params: Tensor, ids: Tensor) -> Tensor:
        """Return the sum over the first n − b trainers' shares of this step."""
        parts = dict(zip(self.others, ids.tensor_split(len(self.others)), strict=True))
        shares: dict[int, Tensor] = {}
        ordered: set[int] = set()
        deadline = self.liveness.clock.now() + self.config.timeout
        # With fewer tasks than trainers, some have none: they are neither asked nor waited for.
        callers = {rank for rank, part in parts.items() if len(part)}
        needed = max(len(callers) - self._spared, 1)
        while len(shares) < needed:
            for rank in sorted((self._idle & callers) - ordered):
                self._give(rank, Order("train", self._step, parts[rank], params))
                ordered.add(rank)
            arrived = self._next(deadline, missing=callers - shares.keys())
            if arrived is None:
                continue
            rank, result = arrived
            if result.number == self._step:
                shares[rank] = result.flat
            else:
                self._dropped += 1
        # In the order of ranks, not of arrival: a repeated run has the same bits.
        return functools.reduce(torch.add, (shares[rank] for rank in sorted(shares)))

    def _first_to_arrive(self, params: Tensor, ids: Tensor) -> Tensor:
        """Return the first share that is not more than ``--ps-max-staleness`` steps behind."""
        if self._first_ids is None:
            self._first_ids = ids
        deadline = self.liveness.clock.now() + self.config.timeout
        while True:
            for rank in sorted(self._idle):
                batch = self._following_batch(self._first_ids)
                self._under_way[rank].append(batch)
                self._give(rank, Order("train", self._step, batch, params))
            arrived = self._next(deadline, missing=set(self.others))
            if arrived is None:
                continue
            rank, result = arrived
            self._taken_in = self._under_way[rank].popleft()
            staleness = self._step - result.number
            if staleness <= self.config.ps_max_staleness:
                self._staleness[staleness] = self._staleness.get(staleness, 0) + 1
                return result.flat
            self._dropped += 1

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return, in async mode, those of the gradient that arrived."""
        return self._taken_in if self.config.ps_mode == "async" else ids

    def _following_batch(self, first_ids: Tensor) -> Tensor:
        """Return the next meta-batch to hand out: what a stopped run had under way, then on."""
        if self._left_over:
            return self._left_over.popleft()
        self._handed_out += 1
        return self.worker.training.following(first_ids, self._handed_out - 1)

    def state(self) -> dict[str, Any]:
        """Return, in async mode, which meta-batches are out: each counts once, whenever it comes.

        ``ahead`` is how many more were handed out than steps were taken.
        """
        if self.config.ps_mode != "async":
            return super().state()
        out = [ids for batches in self._under_way.values() for ids in batches]
        out += self._left_over
        return super().state() | {
            "ahead": self._handed_out - self._step, "under_way": [ids.clone() for ids in out]
        }  # fmt: skip

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Hand out first what was under way."""
        super().restore(state, home)
        if self.config.ps_mode == "async" and "ahead" in state:
            self._handed_out = state["ahead"]
            self._left_over.extend(state["under_way"])

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate a piece on each trainer; pieces of silent ones are handed out again."""
        if self._served is not None:
            return self.worker.evaluate(meta_params, split, ids, self.worker.learner)
        pieces = ids.tensor_split(min(len(self.others), len(ids)))
        params = self.packing.params(meta_params)
        piece_of: dict[int, int] = {}
        rows: dict[int, Tensor] = {}
        todo = deque(range(len(pieces)))
        clock = self.liveness.clock
        began = heard = handed = clock.now()
        while len(rows) < len(pieces):
            for rank in sorted(self._idle):
                if not todo:
                    break
                self._evaluations += 1
                piece_of[self._evaluations] = piece = todo.popleft()
                order = Order("evaluate", self._evaluations, pieces[piece], params, split)
                self._give(rank, order)
            # A piece that takes longer than three times all so far is more likely lost than slow.
            patience = 1.0 + 3 * (heard - began) if rows else self.config.timeout
            deadline = heard + self.config.timeout
            until = min(max(heard, handed) + patience, deadline)
            arrived = self._take(until - clock.now())
            if arrived is None:
                if clock.now() >= deadline:
                    raise self._lost(set(self.others) - self._idle)
                todo.extend(set(range(len(pieces))) - rows.keys() - set(todo))
                handed = clock.now()
                continue
            rank, result = arrived
            if result is None:
                continue
            if result.kind == "train":
                self._backlog.append((rank, result))
            elif result.number in piece_of:
                rows[piece_of[result.number]] = result.flat
                heard = clock.now()
        return torch.cat([rows[piece] for piece in range(len(pieces))])

    def _next(self, deadline: float, missing: set[int]) -> tuple[int, Result] | None:
        """Return a gradient that has arrived; None if a trainer asks for work meanwhile."""
        if self._backlog:
            return self._backlog.popleft()
        while True:
            arrived = self._take(deadline - self.liveness.clock.now())
            if arrived is None:
                if self.liveness.clock.now() >= deadline:
                    raise self._lost(missing)
                continue
            rank, result = arrived
            if result is None or result.kind == "evaluate":
                return None
            return rank, result

    def _take(self, timeout: float) -> tuple[int, Result | None] | None:
        """Return what arrives next, None after ``timeout`` seconds; keep account of both."""
        began = time.monotonic()
        event = self.inbox.take(max(timeout, 0))
        self._waited += time.monotonic() - began
        if event is None:
            return None
        if event.waits:
            self._idle.add(event.rank)
        if event.result is not None:
            self.wire_bytes += event.result.nbytes
        return event.rank, event.result

    def _give(self, rank: int, order: Order) -> None:
        self._idle.discard(rank)
        self.wire_bytes += order.nbytes
        self.inbox.give(rank, order)

    def _survives(self, rank: int, line: str) -> bool:
        """Say whether training goes on without a trainer that was lost; in a thread of its own."""
        return self.go_on_without(rank, line, spared=self._spared)

    def _lost(self, missing: set[int]) -> WorkerLostError:
        return self.liveness.explain(TimeoutError(self.liveness.name(missing)))

    def _forget_counts(self) -> None:
        self._dropped, self._busy, self._waited = 0, 0.0, 0.0
        self._staleness: dict[int, int] = {}

    def report(self) -> dict[str, Any]:
        """Bytes, seconds that the server was busy, dropped gradients, staleness by age."""
        row = super().report() | {"server_seconds": self._busy}
        if self.config.ps_mode != "sync":
            row["dropped"] = self._dropped
        if self.config.ps_mode == "async":
            oldest = max(self._staleness, default=0)
            row["staleness"] = [self._staleness.get(age, 0) for age in range(oldest + 1)]
        self._forget_counts()
        return row

    # ---- a trainer --------------------------------------------------------------------------

    def answer(self) -> None:
        """Do what the server orders, until it says that all is done."""
        # A caller's references to the server's model end with this call, before it leaves.
        do: Callable[[Order], Result | None] = self._do
        if self.config.ps_forward == "remote":
            do = Caller(self.worker, self.world.rank, self.guard)
        result: Result | None = None
        while (order := self._order(result)).kind != "finish":
            result = do(order)

    def _do(self, order: Order) -> Result:
        params = self.packing.to_params(order.params)
        if order.kind == "evaluate":
            rows = self.worker.evaluate(params, order.split, order.ids, self.worker.learner)
            return Result("evaluate", order.number, rows)
        share = self.worker.share(params, order.ids, self.worker.learner)
        self._latest = order.ids
        return Result("train", order.number, self.packing.share(share).cpu())

    def _order(self, result: Result | None) -> Order:
        """Push ``result`` and wait for the next order, for as long as the server lives."""
        arrived = threading.Event()
        # 0: no time limit; a server may test for minutes while its trainers wait.
        answer = rpc.rpc_async(0, _exchange, (self.world.rank, result), timeout=0)
        answer.then(lambda _: arrived.set())
        if result is not None and result.kind == "train":
            self.worker.look_ahead(self._latest)
        self.wait_for(arrived)
        with self.guard():
            order: Order = answer.wait()
        return order

    # ---- the end ----------------------------------------------------------------------------

    def send_home(self) -> None:
        """Order all trainers to leave."""
        nothing = torch.empty(0)
        self.inbox.give_all(Order("finish", 0, nothing, nothing))
