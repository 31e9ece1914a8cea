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


class Heartbeat:
    """A number in the launcher's store, which rank zero raises as long as it runs.

    A collective has either a time limit, which rank zero may well exceed while it tests or writes,
    or none, and then a process waits for a frozen rank zero for ever, deaf to signals: Python
    handles none while it is inside a collective.
    """

    def __init__(self, store: Store, rank: int, patience: float) -> None:
        """Share ``store`` with all; rank zero is lost after ``patience`` seconds of silence."""
        self._store, self._rank, self._patience = store, rank, patience
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._felt: float | None = None
        self._number = b""

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Live, if this is rank zero, until the end of this context."""
        if self._rank == 0:
            self._repeat(lambda: self._store.add("heartbeat", 1))
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                # Within a question to the store it must not meet the interpreter's end; but a
                # frozen store does not answer.
                thread.join(1.0)

    def wait(self, work: dist.Work) -> None:
        """Wait for ``work``, a collective that rank zero begins when it pleases.

        Rank zero itself waits for as long as its patience lasts: the others have nothing to do but
        to take part, and one that was frozen before it did would hold rank zero for ever.

        Args:
            work: What ``async_op=True`` returned.

        Raises:
            RuntimeError: as ``work`` does; on rank zero also if it is not done in time.
            WorkerLostError: without a word, if rank zero is silent.
        """
        while True:
            try:
                work.wait(timedelta(seconds=POLL if self._rank else self._patience))
                return
            except RuntimeError:
                if work.is_completed():
                    # It has failed, or was done just after the time was up.
                    work.wait()
                    return
                if self._rank == 0:
                    raise
            now = time.monotonic()
            if self._felt is None:
                self._felt = now
                self._repeat(self._feel)
            if now > self._felt + self._patience:
                raise WorkerLostError("")

    def _feel(self) -> None:
        """Note when the number is another one than the last time."""
        number = self._store.get("heartbeat")
        if number != self._number:
            self._number, self._felt = number, time.monotonic()

    def _repeat(self, action: Callable[[], object]) -> None:
        """Repeat ``action`` in a thread, several times within the patience.

        In a thread, since a frozen store answers no question, whatever its time limit.
        """

        def run() -> None:
            while True:
                # The store may be gone before this process is, or fail once.
                with contextlib.suppress(RuntimeError):
                    action()
                if self._ended.wait(min(self._patience / 4, 5.0)):
                    return

        self._threads.append(threading.Thread(target=run, name="heartbeat", daemon=True))
        self._threads[-1].start()
