"""How a process that serves waits: not longer than rank zero lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed.rpc as rpc

from maml.errors import WorkerLostError, timed_out
from maml.processes.signals import StopRequest

STOP_PROBE = 5.0
"""Seconds between questions whether rank zero lives, once a stop signal has come."""

PROBE = 3.0
"""Seconds in which a process that lives answers an empty call, whatever it computes."""

_heeding: StopRequest | None = None


def heed(stop: StopRequest) -> None:
    """On rank zero: let the signals that other ranks receive be its own."""
    global _heeding
    _heeding = stop


def _answer(seen: str | None) -> None:
    """Run on rank zero: prove that it lives, and hear of a stop signal."""
    if seen is not None and _heeding is not None and _heeding.signal is None:
        _heeding.signal = seen


def _is_here() -> None:
    """Answer, which says enough."""


def answering(ranks: Iterable[int]) -> set[int]:
    """Return those of ``ranks`` that answer a call that costs nothing."""
    asked = {}
    for rank in ranks:
        # Calling one that is known to be gone fails at once.
        with suppress(RuntimeError):
            asked[rank] = rpc.rpc_async(rank, _is_here, timeout=PROBE)
    found = set()
    for rank, answer in asked.items():
        with suppress(RuntimeError):
            answer.wait()
            found.add(rank)
    return found


def wait_for(event: threading.Event, stop: StopRequest, timeout: float) -> None:
    """Wait for ``event``, as long as rank zero answers.

    A stop signal may reach this process alone: rank zero is told, and decides when to end. It may
    be in the middle of a step; while it lives, it is served.

    Raises:
        WorkerLostError: without a word if rank zero is gone, or is silent for about ``timeout``
            seconds; it has said why, or the launcher will.
    """
    asked, silent = time.monotonic(), 0
    told = False
    while (stop and not told) or not event.wait(0.5):
        patience = STOP_PROBE if stop else timeout / 2
        if not (stop and not told) and time.monotonic() < asked + patience:
            continue
        asked = time.monotonic()
        try:
            rpc.rpc_sync(0, _answer, (stop.signal,), timeout=patience)
            silent, told = 0, bool(stop)
        except RuntimeError as error:
            silent += 1
            told = bool(stop)
            # Once is no proof while it may be busy; a broken connection is.
            if not timed_out(error) or silent == (2 if stop else 1):
                raise WorkerLostError("") from None
