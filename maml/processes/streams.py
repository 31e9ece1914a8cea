"""Standard output and error that end no program: what they do not take goes into a log.

A pipe's reader may end (``head``), a disk may be full, a terminal may close, and a daemon may have
no standard error at all.
"""

import contextlib
import errno
import io
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

from datasets.whole import no_link

LOG = "output.log"
"""The file of a run directory for what could not be printed."""

_log: Path | None = None
_streams: list["Stream"] = []


class Stream(io.FileIO):
    """Standard output or error. Once a write fails, the log takes its place.

    Attributes:
        failure: The error of the first write that failed, or None.
        kept: What is not written yet. It stays here while neither stream nor log takes it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.failure: OSError | None = None
        self.kept = b""
        self._writing = threading.RLock()  # python -u has no buffer with a lock before it

    def write(self, content: Any) -> int:
        """Write all of it, or keep it; never raise."""
        text = bytes(content)
        with self._writing:
            self.kept += text
            try:
                self._write_kept()
            except OSError as error:
                if self.failure is None and _log is not None and self.fileno() == 1:
                    line = f"standard output: {error.strerror}; the rest is in {_log}"
                    print(line, file=sys.stderr, flush=True)
                self.failure = self.failure or error
                self.turn()
        return len(text)

    def turn(self) -> None:
        """Put the log in the place of a stream that has failed, also for libraries in C."""
        with self._writing, contextlib.suppress(OSError):
            if self.kept and _log is not None:
                with open(no_link(_log), "ab") as file:
                    os.dup2(file.fileno(), self.fileno())
                self._write_kept()

    def _write_kept(self) -> None:
        while self.kept:
            count = super().write(self.kept)
            if count is None:  # a pipe that does not block is full
                select.select([], [self], [])
            self.kept = self.kept[count or 0 :]


def install() -> None:
    """Let no ``print`` of this process fail any more. Call this before anything is printed.

    If a descriptor is closed, open the null device in its place: else the next file that is opened
    would get its number, and messages of libraries in C. It is open for reading only, so that
    writes fail as before, also in child processes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # takes the lowest number
    for number, name in enumerate(("stdout", "stderr"), 1):
        own = getattr(sys, f"__{name}__")  # None if it was closed
        if getattr(sys, name) is not own:
            continue  # a caller in Python has put another in its place
        stream = Stream(number)
        _streams.append(stream)
        straight = own is not None and own.write_through  # python -u
        text = io.TextIOWrapper(
            stream if straight else io.BufferedWriter(stream),
            own and own.encoding,
            errors="backslashreplace",  # a path may not be UTF-8
            line_buffering=number == 2 or stream.isatty(),
            write_through=straight,
        )
        setattr(sys, name, text)


def log_in(folder: Path) -> None:
    """Write what cannot be printed, before and from now on, into the file `LOG` of ``folder``."""
    global _log
    _log = folder / LOG
    for stream in _streams:
        stream.turn()


def lost() -> OSError | None:
    """Return why standard output did not take all that was printed, if it is in no log either.

    Return None if its reader has gone, or if it was closed: then nobody misses it.
    """
    sys.stdout.flush()
    for stream in _streams:
        if stream.kept and stream.fileno() == 1 and stream.failure is not None:
            unread = stream.failure.errno in (errno.EPIPE, errno.EBADF)
            return None if unread else stream.failure
    return None
