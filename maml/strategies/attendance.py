"""How a process that serves waits: not longer than those who are to call it live."""

from __future__ import annotations

import threading
import time

import torch.distributed.rpc as rpc

from maml.distributed import StopRequest
from maml.errors import WorkerLostError

STOP_GRACE = 20.0
"""Seconds that a serving process outlives a SIGTERM, for rank zero to write its checkpoint."""


def _answer() -> None:
    """Prove that this process serves."""


def wait_for(event: threading.Event, stop: StopRequest, timeout: float) -> None:
    """Wait for ``event``, as long as rank zero answers.

    A stop signal reaches every process of a job; rank zero decides when to end, and the others
    outlive the signal by `STOP_GRACE` seconds at most.

    Raises:
        WorkerLostError: without a word if rank zero is gone; it has said why, or the launcher
            will.
    """
    deadline, probed = None, time.monotonic()
    while not event.wait(0.5):
        now = time.monotonic()
        if stop:
            deadline = deadline or now + STOP_GRACE
        elif now < probed + timeout:
            continue
        probed = now
        try:
            rpc.rpc_sync(0, _answer, timeout=STOP_GRACE / 4 if stop else timeout)
        except RuntimeError:
            deadline = 0.0
        if deadline is not None and time.monotonic() > deadline and not event.is_set():
            raise WorkerLostError("")
