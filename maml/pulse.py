"""Rank zero's sign of life, for processes that wait for it without a time limit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from maml.errors import WorkerLostError

POLL = 0.5
"""Seconds after which a process that waits looks around: for signals, and for rank zero."""


class Pulse:
    """A number in the launcher's store, which rank zero raises as long as it runs.

    A collective has either a time limit, which rank zero may well exceed while it tests or writes,
    or none, and then a process waits for a frozen rank zero for ever, deaf to signals: Python
    handles none while it is inside a collective.
    """

    def __init__(self, store: Store, rank: int, patience: float) -> None:
        """Share ``store`` with all; rank zero is lost after ``patience`` seconds of silence."""
        self._store, self._rank, self._patience = store, rank, patience

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """On rank zero: live, until the end of this context."""
        ended = threading.Event()

        def beat() -> None:
            # The store may be gone before this context is.
            with contextlib.suppress(RuntimeError):
                while True:
                    self._store.add("pulse", 1)
                    if ended.wait(min(self._patience / 4, 5.0)):
                        return

        if self._rank == 0:
            threading.Thread(target=beat, name="pulse", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def wait(self, work: dist.Work, stopping: Callable[[], object] = lambda: None) -> None:
        """Wait for ``work``, a collective that rank zero begins when it pleases.

        Args:
            work: What ``async_op=True`` returned.
            stopping: Whether a stop signal has come; from then on rank zero has the patience's
                time to take up the work, alive or not.

        Raises:
            RuntimeError: as ``work`` does.
            WorkerLostError: without a word, if rank zero is silent.
        """
        looked, last, since = time.monotonic(), b"", time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=POLL))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            now = time.monotonic()
            if not stopping() and now > looked + self._patience / 4:
                # Where rank zero itself holds the store, its silence is the store's.
                looked, last, before = now, self._read(), last
                if last and last != before:
                    since = time.monotonic()
            if now > since + self._patience:
                raise WorkerLostError("")

    def _read(self) -> bytes:
        # A question that the store does not answer may take twice as long as this.
        self._store.set_timeout(timedelta(seconds=self._patience / 4))
        try:
            return self._store.get("pulse")
        except RuntimeError:
            return b""
