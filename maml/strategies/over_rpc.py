"""The base of strategies over RPC: rank 0 drives, and the others come to it for orders.

In one call a rank brings its last result and asks for its next order. As in PyTorch's tutorial on
asynchronous execution, the call holds no thread while it waits, because its answer is a future.
RPC's threads only put what arrives into a queue. Rank 0's main thread decides everything else: whom
to give which order, and whose results to wait for.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed.rpc as rpc
import torchopt.distributed as todist
from torch import Tensor
from torch.distributed.rpc.internal import RemoteException
from torch.utils import _pytree as pytree

from maml.config import Config
from maml.errors import UserError, WorkerLostError
from maml.processes.clock import within
from maml.processes.liveness import GOODBYE
from maml.processes.namespaces import in_own_network
from maml.processes.store import START_TIMEOUT
from maml.processes.world import World, choose_interface
from maml.strategies.base import Strategy
from maml.worker import Worker

YIELD = 0.0005
"""Seconds that the transport's threads need to send a message. If all cores compute, they wait for
a time slice. Then the other process starts later, and is the last to finish."""

Answer: TypeAlias = torch.futures.Future[Any]
"""The later answer to a call. Until the answer comes, the call holds no thread."""

Order: TypeAlias = tuple[Any, ...]
"""What a rank is to do: a method of its strategy, and the method's arguments."""

_this: OverRpc | None = None


class Arrival(NamedTuple):
    """What a rank brings: a ``result`` (None if it only comes), and the bytes sent for it.

    ``answer`` is the future of the order that it waits for. None as an order tells it to leave.
    """

    rank: int
    result: Any
    answer: Answer
    wire_bytes: int = 0


class OverRpc(Strategy):
    """A strategy of one driving process, rank 0, and others that serve it.

    Attributes:
        others: The ranks that serve.
        spared: How many of the serving ranks the run can lose and still go on.
        gone: On rank 0: the serving ranks that were lost.
        arrivals: On rank 0: what the others bring.
        idle: On rank 0: the ranks that wait for an order, with the future of that order.
        round: On rank 0: the number of rounds so far, each of which ends with `collect`.
        under_way: On rank 0: of each rank with an order, the order's round, and the order.
        ages: How many results were of orders 0, 1, 2 … rounds before.
        waited: Seconds that `take` has waited.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.drives, self.home = world.rank == 0, torch.device("cpu")
        self.others = range(1, world.size)
        self.spared = 0
        self.gone = self.liveness.excused
        self.liveness.survives = self.survives
        self.arrivals = queue.SimpleQueue[Any]()
        self.idle: dict[int, Answer] = {}
        self.under_way: dict[int, tuple[int, Order]] = {}
        self.round, self.ages, self.waited = 0, Counter[int](), 0.0
        self._closing, self._closed = threading.Lock(), False

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Join TorchOpt's RPC world.

        The shutdown waits for no peer. RPC's own graceful shutdown needs the launcher's store, and
        a frozen peer would block it for ever. Rank 0 waits earlier, in `finish`.
        """
        choose_interface(self.world)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method="maml://",
            num_worker_threads=max(self.config.rpc_threads, self.world.size),
            rpc_timeout=max(START_TIMEOUT, self.config.timeout),
            # Not shared memory: its threads never sleep, and take core time that the tasks need.
            _transports=["ibv", "uv"],
            _channels=["basic"],
        )

        @in_own_network
        @todist.auto_init_rpc(self._init_worker, rpc_backend_options=options)
        def enter() -> None:
            """Do nothing; the decorator initialises RPC."""

        try:
            enter()
        finally:
            # TorchOpt registers a graceful shutdown at exit, which has no timeout.
            atexit.unregister(rpc.shutdown)
        # Until here, a process may only be slow to import. From here on, `maml.processes.liveness`
        # finds silent processes, so RPC needs no limit (0).
        rpc._set_rpc_timeout(0)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            within(5.0, lambda: rpc.shutdown(graceful=False), None)

    def _init_worker(self) -> None:
        global _this
        _this = self

    def serve(self) -> None:
        """Do what rank 0 orders, until it announces that all is done."""
        self.stop.install()
        result = None
        while (order := self._next_order(result)) is not None:
            method, *given = order
            result = method(self, *given)

    def _next_order(self, result: Any) -> Order | None:
        """Bring the ``result``; wait for the next order as long as rank 0 lives."""
        arrived = threading.Event()
        with self.liveness.guard(limited=False):
            brought = (type(self).exchange, self.world.rank, result)
            answer = rpc.rpc_async(0, on_strategy, brought)
            answer.then(lambda _: arrived.set())
            arrived.wait()  # unlike the future's, this wait lets Python handle signals
            order: Order | None = answer.wait()
        return order

    def exchange(self, rank: int, result: Any, wire_bytes: int | None = None) -> Answer:
        """On rank 0: take in what ``rank`` brings; return the future of its next order.

        ``wire_bytes``: the bytes that were sent for it; by default those of the result.
        """
        answer: Answer = torch.futures.Future()
        sent = bytes_of(result) if wire_bytes is None else wire_bytes
        with self._closing:
            if self._closed:
                answer.set_result(None)
            else:
                self.arrivals.put(Arrival(rank, result, answer, sent))
        return answer

    def take(self) -> Arrival | None:
        """Return the next arrival of any rank; None to let `collect` look again at what it has."""
        began = time.monotonic()
        with self.liveness.guard():
            arrival: Arrival = self.arrivals.get()
        self.waited += time.monotonic() - began
        return arrival

    def hand_out(self, order_for: Callable[[int], Order | None]) -> None:
        """Give each rank that waits its order, if ``order_for(rank)`` has one for it."""
        for rank in sorted(self.idle):
            if (order := order_for(rank)) is not None:
                self.under_way[rank] = self.round, order
                self.wire_bytes += bytes_of(order)
                self.idle.pop(rank).set_result(order)

    def collect(
        self,
        order_for: Callable[[int], Order | None],
        enough: Callable[[Mapping[int, Any]], bool],
        oldest: int = 0,
    ) -> dict[int, tuple[Order, Any]]:
        """End a round: give orders until ``enough(results by rank)``.

        A result counts if its order is of this round or of ``oldest`` rounds before. Return the
        orders and results that count, in the order of ranks.
        """
        results: dict[int, tuple[Order, Any]] = {}
        while not enough(results):
            self.hand_out(order_for)
            if (arrival := self.take()) is None:
                continue
            self.idle[arrival.rank] = arrival.answer
            if arrival.result is not None:
                self.wire_bytes += arrival.wire_bytes
                begun, order = self.under_way.pop(arrival.rank)
                age = self.round - begun
                self.ages[age] += 1
                if age <= oldest:
                    results[arrival.rank] = order, arrival.result
        self.round += 1
        return dict(sorted(results.items()))

    def finish(self) -> None:
        """On rank 0: tell the others that all is done, and wait until the living ones have left."""
        if not self.drives:
            return
        self.send_home()
        members = self.liveness.members
        # A process may be in the middle of a gradient.
        for rank in self.liveness.await_leaving(GOODBYE if self.stop else self.config.timeout):
            killed = "; killed" if members.kill(rank) else ""
            line = f"{members.name([rank])} did not leave in time{killed}; all work is done"
            print(line, file=sys.stderr, flush=True)
        for rank in sorted(self.gone):
            # A process that was given up may be stopped by a signal, and would never end.
            members.kill(rank)

    def send_home(self) -> None:
        """Tell the others that all is done: those that wait for an order, and who comes later."""
        with self._closing:
            self._closed = True
        waiting = [*self.idle.values()]
        while not self.arrivals.empty():
            waiting.append(self.arrivals.get().answer)
        for answer in waiting:
            answer.set_result(None)

    def survives(self, ranks: Collection[int], line: str) -> bool:
        """Return whether the run goes on without lost ranks. A thread of `Liveness` calls it."""
        if sum(map(self.counts, self.gone.union(ranks))) > self.spared:
            return False
        them = "it" if len(ranks) == 1 else "them"
        print(f"{line}; training goes on without {them}", file=sys.stderr, flush=True)
        return True

    def counts(self, rank: int) -> bool:
        """Return whether a lost rank counts as one of those that can be spared."""
        return True


@rpc.functions.async_execution
def on_strategy(method: Callable[..., Any], *args: Any) -> Answer:
    """Run on another process: ``method`` of its strategy, because no call can name an object.

    The method may return the future of its answer. A failure is reported there, with rank and host:
    an exception that travels over RPC arrives with its text cut into lines, or unreadable.
    """
    assert _this is not None
    liveness = _this.liveness
    try:
        with liveness.waits.during("called"):
            outcome = method(_this, *args)
    except BaseException as error:  # also SystemExit, by which no thread ends its process
        liveness.report(error)
        if not isinstance(error, (UserError, WorkerLostError)):
            traceback.print_exc()
        # RPC's own form of an exception. If we raised it, RPC would also print a traceback.
        outcome = RemoteException("it has reported why", RuntimeError)
    if isinstance(outcome, torch.futures.Future):
        return outcome
    answer: Answer = torch.futures.Future()
    answer.set_result(outcome)
    return answer


def bytes_of(content: Any) -> int:
    """Return the bytes of all tensors in an order or a result."""
    return sum(x.nbytes for x in pytree.tree_leaves(content) if isinstance(x, Tensor))
