"""What the strategies over RPC share: rank 0 drives, the others serve it until all is done."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import ParamSpec, TypeVar, cast

import torch.distributed.rpc as rpc
from torch.distributed.rpc.internal import RemoteException

from datasets.errors import DataError
from maml.config import Config
from maml.errors import UserError, WorkerLostError
from maml.processes.liveness import GOODBYE
from maml.processes.rpc_world import rpc_world
from maml.processes.setup import init_process
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.strategies.shutdown import Shutdown, leave
from maml.worker import Worker

TELL = 5.0
"""Seconds in which rank 0 hears of a stop signal, or is about to be lost."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="OverRpc")

_this: OverRpc | None = None


def this(kind: type[S]) -> S:
    """Return this process's strategy: a call that comes in names a function, and no object."""
    found = _strategy()
    assert isinstance(found, kind)
    return found


def _strategy() -> OverRpc:
    if _this is None:
        raise RuntimeError("this process was called before it was ready")
    return _this


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
            self._shutdown = Shutdown(self.liveness)
        self.get_ready()
        _this = self

    def get_ready(self) -> None:
        """Make what calls need, before any comes."""
        return None

    def serve(self) -> None:
        """Serve rank 0 until it says that all is done."""
        self.stop.install()
        self.answer()
        leave(self.world.rank)

    def answer(self) -> None:
        """Wait while calls are answered, in the transport's threads."""
        self.wait_for(self.finished)

    def wait_for(self, event: threading.Event) -> None:
        """Wait for ``event``, for as long as rank 0 lives.

        A stop signal may reach this process alone: rank 0 is told, and decides when to end. It may
        be in the middle of a step; while it lives, it is served.
        """
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
            self._shutdown.take(self.others, self.gone, patience)

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


def _finish() -> None:
    _strategy().finished.set()


def _hear(seen: str) -> None:
    """Run on rank 0: another rank has received a stop signal, which counts as its own."""
    stop = _strategy().stop
    stop.signal = stop.signal or seen


def reported(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that others call over RPC tell its failure itself, with its rank and host.

    Over RPC, an exception's text is cut into lines, or cannot be read at all.
    """

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
