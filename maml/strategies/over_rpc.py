"""What the strategies over RPC share: rank 0 drives, the others serve it until all is done."""

import functools
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import ParamSpec, TypeVar, cast

import torch.distributed.rpc as rpc
from torch.distributed.rpc.internal import RemoteException
from torch.futures import Future

from datasets.errors import DataError
from maml.config import Config
from maml.errors import UserError, WorkerLostError
from maml.processes.board import BEAT
from maml.processes.liveness import GOODBYE, Liveness
from maml.processes.rpc_world import rpc_world
from maml.processes.setup import init_process
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.worker import Worker

SILENT = 3.0
"""Seconds without a heartbeat after which a process is not waited for, once all is done."""

TELL = 5.0
"""Seconds in which rank 0 hears of a stop signal, or is about to be lost."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="OverRpc")

_this: "OverRpc | None" = None


def this(kind: type[S]) -> S:
    """Return this process's strategy: a call that comes in names a function, and no object."""
    found = _strategy()
    assert isinstance(found, kind)
    return found


def _strategy() -> "OverRpc":
    if _this is None:
        raise RuntimeError("this process was called before it was ready")
    return _this


class Shutdown:
    """On rank 0: who of the others is about to leave, and waits for all."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._changed = threading.Condition()
        self._leaving: dict[int, Future[None]] = {}

    def leave(self, rank: int) -> Future[None]:
        """Return the future of when all leave."""
        future: Future[None] = Future()
        with self._changed:
            self._leaving[rank] = future
            self._changed.notify_all()
        return future

    def take(self, others: Iterable[int], failed: set[int], patience: float) -> None:
        """Wait, but not longer than ``patience``, for those who live; then let all go.

        The ranks ``others`` were told that all is done; those of them that ``failed`` are gone.
        """
        clock = self._liveness.clock
        began = clock.now()
        with self._changed:
            while missing := set(others) - failed - self._leaving.keys():
                waited = clock.now() - began
                silent = self._liveness.silent(SILENT if waited > GOODBYE else math.inf)
                if missing <= silent or waited > patience:
                    break
                # In pieces, as the clock may stand still meanwhile.
                self._changed.wait(BEAT)
            leaving = list(self._leaving.values())
        for rank in sorted(missing - self._liveness.excused):
            # One of this host may be frozen.
            member, line = self._liveness.members[rank], self._liveness.name([rank])
            end = "" if not member.is_near else "; killed" if member.kill() else "; it is gone"
            line += f" did not leave in time{end}; all work is done"
            print(line, file=sys.stderr, flush=True)
        for rank in failed:
            # One that was given up may be stopped, and would wait for ever.
            if self._liveness.members[rank].is_near:
                self._liveness.members[rank].kill()
        for future in leaving:
            future.set_result(None)


class OverRpc(Strategy):
    """A strategy of one driving process, rank 0, and others that serve it.

    Attributes:
        others: The ranks that serve.
        gone: On rank 0, those of them that were lost.
        finished: Set when rank 0 has said that all is done.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.others = range(1, world.size)
        self.gone: set[int] = set()
        self.finished = threading.Event()

    @property
    def drives(self) -> bool:
        """Rank 0 drives."""
        return self.world.rank == 0

    def transport(self) -> AbstractContextManager[None]:
        """Join the RPC world."""
        return rpc_world(
            self.world,
            threads=max(self.config.rpc_threads, self.world.size),
            timeout=self.config.timeout,
            worker_init=self._init_worker,
        )

    def _init_worker(self) -> None:
        global _this
        init_process(self.config, self.world)
        if self.drives:
            self.shutdown = Shutdown(self.liveness)
        self.get_ready()
        _this = self

    def get_ready(self) -> None:
        """Make what calls need, before any comes."""
        return None

    def serve(self) -> None:
        """Serve rank 0 until it says that all is done."""
        self.stop.install()
        self.answer()
        # Without a time limit: rank 0, which is watched over, may wait for one that is slow.
        with suppress(RuntimeError):
            rpc.rpc_sync(0, _leave, (self.world.rank,), timeout=0)

    def answer(self) -> None:
        """Wait while calls are answered, in the transport's threads."""
        self.wait_for(self.finished)

    def wait_for(self, event: threading.Event) -> None:
        """Wait for ``event``, for as long as rank 0 lives, which is told of a stop signal."""
        told = False
        with self.liveness.waits.serving():
            while (self.stop and not told) or not event.wait(0.5):
                if self.stop.signal is not None and not told:
                    told = True
                    with suppress(RuntimeError):
                        rpc.rpc_sync(0, _hear, (self.stop.signal,), timeout=TELL)

    def finish(self) -> None:
        """Send the others home; wait for those who live."""
        if self.drives:
            self.send_home()
            patience = GOODBYE if self.stop else self.config.timeout
            self.shutdown.take(self.others, self.gone, patience)

    def send_home(self) -> None:
        """Tell the others that all is done."""
        for rank in set(self.others) - self.gone:
            with suppress(RuntimeError):
                rpc.rpc_async(rank, _finish)

    def go_on_without(self, rank: int, line: str, *, spared: int) -> bool:
        """Give up a lost rank; say whether the run goes on: with up to ``spared`` of them gone."""
        self.gone.add(rank)
        if len(self.gone) > spared:
            return False
        print(f"{line}; training goes on without it", file=sys.stderr, flush=True)
        return True


@rpc.functions.async_execution
def _leave(rank: int) -> Future[None]:
    """Run on rank 0: another one leaves."""
    return _strategy().shutdown.leave(rank)


def _finish() -> None:
    _strategy().finished.set()


def _hear(seen: str) -> None:
    """Run on rank 0: another rank has received a stop signal, which counts as its own."""
    stop = _strategy().stop
    stop.signal = stop.signal or seen


def reported(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that others call over RPC tell its failure itself: RPC cuts up its text."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        liveness = _strategy().liveness
        try:
            with liveness.waits.called():
                return function(*args, **kwargs)
        except Exception as error:
            liveness.report(error)
            if not isinstance(error, (UserError, DataError, WorkerLostError)):
                traceback.print_exc()
            # As RPC returns an exception, which it would print with a traceback of this file.
            return cast("T", RemoteException("it has told why", RuntimeError))

    return call
