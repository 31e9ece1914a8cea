"""What many processes on many hosts do to one folder: one at a time, and who works on what."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from datasets.locks import Lock
from maml.errors import UserError

GRACE = 30.0
"""Seconds after which a silent process is given up, as Optuna's locks are."""


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


def is_held(path: Path) -> bool:
    """Return whether a process works under the lock at ``path``, on this host or another.

    Where hosts share a folder without locks, one that has given no sign of life for `GRACE` seconds
    is given up.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            return Lock(path).is_held()
        except OSError:
            return time.time() - path.stat().st_mtime < GRACE
    return False
