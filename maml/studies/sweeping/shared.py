"""What many processes on many hosts do to one folder: one at a time, and who of them lives."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from datasets.locks import Lock
from maml.errors import UserError
from maml.processes.identity import Identity

GRACE = 30.0
"""Seconds after which a silent worker of another machine is given up, as Optuna's locks are."""


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time, of all that share a folder, be within this context."""
    lock = JournalFileOpenLock(str(path))
    lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # this process was stopped, and given up
            lock.release()


def journal(path: Path) -> JournalStorage:
    """Open Optuna's journal at ``path``, without a last line that a power cut has left unfinished.

    Such a line was never acted upon; the next one would be appended to it.

    Raises:
        UserError: naming the file, if another line is damaged.
    """
    with alone(path), open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: damaged, and not at its end: {error}; restore it, or begin a sweep in "
            "another --folder"
        ) from error


class Workers:
    """The processes that work in a folder, each with a file that it locks and keeps touching.

    Optuna's own heartbeat needs a database, which hosts do not share by a folder.

    Attributes:
        own: What the others know this process by, which begins with its machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machine = Identity.own().place.partition(" ")[0]
        self.own = f"{self._machine}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # The last sign of each, and since when it is known.
        self._seen: dict[str, tuple[int, float]] = {}

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Be one of them within this context."""
        path = self._folder / self.own
        path.touch()  # where there are no locks, too
        try:
            with Lock(path).held():
                yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def is_gone(self, worker: str) -> bool:
        """Return whether a worker is known to be gone.

        One of this machine is gone as soon as its lock is free. One of another, or of this one
        before it was started anew, when this process has seen no sign of it for `GRACE` seconds.
        """
        path = self._folder / worker
        try:
            with open(path) as file:  # network folders may tell of an old state until it is opened
                sign = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return True  # it has said goodbye
        with contextlib.suppress(OSError):  # this folder has no locks
            if worker.startswith(self._machine):
                return not Lock(path).is_held()
        if self._seen.get(worker, (None, 0.0))[0] != sign:
            self._seen[worker] = sign, time.monotonic()
        return time.monotonic() - self._seen[worker][1] > GRACE
