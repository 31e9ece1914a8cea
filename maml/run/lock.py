"""One training a run directory: two at once would write over each other's rows and checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path

from datasets import locks
from maml.errors import UserError


class Lock:
    """Held by the process that trains into a run directory, until `release`, or its end.

    A job that is submitted again while the first still runs is how two come to meet. The lock is
    the operating system's: that of a killed process is gone with it.
    """

    def __init__(self, run_dir: Path) -> None:
        """Take ``run_dir``, an existing directory.

        Raises:
            UserError: naming the flag, if another process has it.
        """
        self._lock = locks.Lock(run_dir / ".lock")
        try:
            # Not every shared folder has locks: there, nothing is known of others.
            self._lock.acquire()
        except locks.HeldError:
            raise UserError(
                f"--run-dir {run_dir}: {self._lock.holder()} is training into it; end it first, or "
                "choose another directory"
            ) from None

    @staticmethod
    def is_held(run_dir: Path) -> bool:
        """Whether a process, this one included, has ``run_dir`` now."""
        with contextlib.suppress(OSError):
            return locks.Lock(run_dir / ".lock").is_held()
        return False

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
