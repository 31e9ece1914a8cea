"""How a process that serves over RPC waits, and what it tells rank zero meanwhile."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar, cast

import torch.distributed.rpc as rpc
from torch.distributed.rpc.internal import RemoteException

from datasets.errors import DataError
from maml.errors import UserError, WorkerLostError
from maml.processes.liveness import Liveness
from maml.processes.signals import StopRequest

TELL = 5.0
"""Seconds in which rank zero hears of a stop signal, or is about to be lost."""

P = ParamSpec("P")
T = TypeVar("T")

_heeding: StopRequest | None = None


class Seat(Generic[T]):
    """What calls that come in over RPC are for: they name functions of a module, and no object.

    A strategy's module has one, and takes it when its process is ready.

    Attributes:
        finished: Set when rank zero has said that all is done.
    """

    def __init__(self) -> None:
        self._taken: T | None = None
        self.finished = threading.Event()

    def take(self, by: T) -> None:
        """Serve ``by`` from here on."""
        self._taken = by
        self.finished.clear()

    def __call__(self) -> T:
        """Return who is served."""
        if self._taken is None:
            raise RuntimeError("this process was called before it was ready")
        return self._taken


def heed(stop: StopRequest) -> None:
    """On rank zero: let the signals that other ranks receive be its own."""
    global _heeding
    _heeding = stop


def _hear(seen: str) -> None:
    """Run on rank zero: another rank has received a stop signal."""
    if _heeding is not None and _heeding.signal is None:
        _heeding.signal = seen


def wait_for(event: threading.Event, stop: StopRequest, liveness: Liveness) -> None:
    """Wait for ``event``, as long as rank zero lives, which ``liveness`` watches over.

    A stop signal may reach this process alone: rank zero is told, and decides when to end. It may
    be in the middle of a step; while it lives, it is served.
    """
    told = False
    with liveness.serving():
        while (stop and not told) or not event.wait(0.5):
            if stop.signal is not None and not told:
                told = True
                with suppress(RuntimeError):
                    rpc.rpc_sync(0, _hear, (stop.signal,), timeout=TELL)


def reported(liveness: Callable[[], Liveness]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function that others call over RPC tell its failure itself, with its rank and host.

    Over RPC, an exception's text is cut into lines, or cannot be read at all.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                with liveness().called():
                    return function(*args, **kwargs)
            except Exception as error:
                liveness().report(error)
                if not isinstance(error, (UserError, DataError, WorkerLostError)):
                    traceback.print_exc()
                # As RPC returns an exception, which it would print with a traceback of this file.
                return cast("T", RemoteException("it has told why", RuntimeError))

        return call

    return decorate
