"""Optuna's journal of a sweep, made to survive a power cut."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from launch.sweeping.shared import FolderLock
from maml.errors import UserError


class Journal(JournalFileBackend):
    """A journal whose last line may have been cut short: the next record begins a new line.

    Without that the two would be one line, and the whole journal unreadable. A line that was cut
    short was never acted upon.
    """

    def __init__(self, path: Path, lock: Path) -> None:
        """Open the journal at ``path``; whoever writes holds ``lock``."""
        self._path, self._guard = path, FolderLock(lock)
        super().__init__(str(path))  # its own lock is not used
        with self._guard.held():
            self._mend()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, after a whole line."""
        with self._guard.held():
            self._mend()
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            with open(self._path, "ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Yield the records from one on.

        Raises:
            UserError: naming the file, if a line in the middle is damaged.
        """
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:
            raise UserError(
                f"{self._path}: damaged, and not at its end: {error}; restore it, or begin a sweep "
                "in another --folder"
            ) from error

    def _mend(self) -> None:
        """Cut off what follows the last whole record. The lock is held."""
        with open(self._path, "rb+") as file:
            size = end = file.seek(0, os.SEEK_END)
            if not size:
                return
            while end:
                begin = max(0, end - 65536)
                file.seek(begin)
                block = file.read(end - begin)
                if end == size and block.endswith(b"}\n"):
                    return  # nearly always
                last = block.rfind(b"}\n")
                if last >= 0:
                    file.truncate(begin + last + 2)
                    return
                end = begin + 1 if begin else 0
            file.truncate(0)
