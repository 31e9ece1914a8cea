"""The base of strategies over RPC: rank 0 drives, and the others serve it until all is done."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed.rpc as rpc
import torchopt.distributed as todist
from torch.distributed.rpc.internal import RemoteException

from maml.config import Config
from maml.errors import UserError, WorkerLostError
from maml.processes.clock import within
from maml.processes.liveness import GOODBYE
from maml.processes.namespaces import in_own_network
from maml.processes.store import START_TIMEOUT
from maml.processes.world import World, choose_interface
from maml.strategies.base import Strategy
from maml.worker import Worker

SILENT = 3.0
"""`GOODBYE` seconds after the end, rank 0 gives up processes silent for this many seconds."""

T = TypeVar("T")
Answer: TypeAlias = torch.futures.Future[Any]
"""The later answer to a call. Until the answer comes, the call holds no thread."""

_this: OverRpc | None = None


class OverRpc(Strategy):
    """A strategy of one driving process, rank 0, and others that serve it.

    Attributes:
        others: The ranks that serve.
        spared: How many of the serving ranks the run can lose and still go on.
        gone: On rank 0: the serving ranks that were lost.
        finished: Set when rank 0 has announced that all is done.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.drives, self.home = world.rank == 0, torch.device("cpu")
        self.others = range(1, world.size)
        self.spared = 0
        self.gone: set[int] = set()
        self.finished = threading.Event()
        self.liveness.survives = self.survives

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
        """Wait until all is done, while the transport's threads answer calls."""
        self.stop.install()
        self.wait_for(self.finished)

    def wait_for(self, event: threading.Event) -> None:
        """Wait for ``event`` as long as rank 0 lives, even if this process gets a stop signal."""
        with self.liveness.waits.during("serving"):
            event.wait()

    def finish(self) -> None:
        """On rank 0: tell the others that all is done, and wait until the living ones have left."""
        if not self.drives:
            return
        self.send_home()
        liveness, clock = self.liveness, self.liveness.clock
        patience = GOODBYE if self.stop else self.config.timeout
        began = clock.now()
        # A process may be in the middle of a gradient.
        while missing := liveness.staying() - self.gone:
            waited = clock.now() - began
            silent = liveness.silent(SILENT if waited > GOODBYE else math.inf)
            if missing <= silent or waited > patience:
                break
            time.sleep(0.05)
        for rank in sorted(missing - liveness.excused):
            killed = "; killed" if liveness.members.kill(rank) else ""
            line = (
                f"{liveness.members.name([rank])} did not leave in time{killed}; all work is done"
            )
            print(line, file=sys.stderr, flush=True)
        for rank in self.gone:
            # A process that was given up may be stopped by a signal, and would never end.
            liveness.members.kill(rank)

    def send_home(self) -> None:
        """Tell the others that all is done."""
        for rank in set(self.others) - self.gone:
            with suppress(RuntimeError):
                rpc.rpc_async(rank, _finish)

    def survives(self, ranks: Collection[int], line: str) -> bool:
        """Give up lost ranks; return whether the run goes on. A thread of `Liveness` calls it."""
        self.gone.update(ranks)
        if sum(map(self.counts, tuple(self.gone))) > self.spared:
            return False
        them = "it" if len(ranks) == 1 else "them"
        print(f"{line}; training goes on without {them}", file=sys.stderr, flush=True)
        return True

    def counts(self, rank: int) -> bool:
        """Return whether a lost rank counts as one of those that can be spared."""
        return True


def _finish() -> None:
    assert _this is not None
    _this.finished.set()


def on_strategy(method: Callable[..., T], *args: Any) -> T:
    """Run on another process: ``method`` of its strategy, because no call can name an object.

    A failure is reported there, with rank and host: an exception that travels over RPC arrives with
    its text cut into lines, or unreadable.
    """
    assert _this is not None
    liveness = _this.liveness
    try:
        with liveness.waits.during("called"):
            return method(_this, *args)
    except BaseException as error:  # also SystemExit, by which no thread ends its process
        liveness.report(error)
        if not isinstance(error, (UserError, WorkerLostError)):
            traceback.print_exc()
        # RPC's own form of an exception. If we raised it, RPC would also print a traceback.
        return cast("T", RemoteException("it has reported why", RuntimeError))


@rpc.functions.async_execution
def answer_later(method: Callable[..., Answer], *args: Any) -> Answer:
    """Run on another process: ``method`` of its strategy, which returns the future answer."""
    return method(_this, *args)
