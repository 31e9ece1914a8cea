"""File locks. Each file names the process that has the lock, and nobody waits for ever.

The operating system frees the lock of a process that ends. It keeps the lock of a process that is
stopped, or whose host is lost. Therefore a process that works under a lock also sets the time of
the file every few seconds: its sign of life. Who waits for the lock looks at this time, and stops
waiting when it has not changed for a while. Nothing here imports torch.
"""

import contextlib
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from filelock import FileLock, Timeout

PATIENCE_S = 60.0  # without a sign of life: then a process stops waiting
BEAT_S = 5.0  # between two signs of life; a process that waits for longer says for whom


# Before version 4, as beside an older torch, a lock is never a soft one, and knows no such word.
_FIRM: Any = {"fallback_to_soft": False} if int(filelock.__version__.split(".")[0]) >= 4 else {}


class HeldError(TimeoutError):
    """Another process has the lock. The message names the file and the process."""


class Lock:
    """The lock of one file, which stays after the release. Threads exclude each other, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The members of a group may share a folder, so each may write the file.
        self._lock = FileLock(path, mode=0o664, thread_local=False, **_FIRM)

    def acquire(self, patience: float = 0.0) -> bool:
        """Wait while the holder gives signs of life, and then for ``patience`` seconds.

        Return whether this process has the lock now. False: the folder has no locks (some shared
        folders), or cannot be written. Raise :class:`HeldError` if another process has the lock.
        """
        since, sign = time.monotonic(), self._sign()
        # One line says for whom this process waits; of several on a host, one says it.
        says = patience > BEAT_S and os.environ.get("LOCAL_RANK", "0") == "0"
        while True:
            try:
                self._lock.acquire(timeout=min(patience, BEAT_S))
                break
            except Timeout:
                pass
            except (OSError, NotImplementedError):  # before version 4 the latter
                return False
            if (now := self._sign()) != sign:
                since, sign = time.monotonic(), now
            elif time.monotonic() - since >= patience:
                silent = f", silent for {patience:.0f} s" if patience else ""
                raise HeldError(f"{self.path}: held by {self.holder()}{silent}")
            if says:
                says = False
                line = f"waiting for {self.path}: held by {self.holder()}"
                print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            self.path.write_text(f"process {os.getpid()} of {platform.node()} since {when}\n")
        return True

    def is_held(self) -> bool:
        """Return whether a process has the lock. ``OSError``: the folder does not support locks."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return True
        self._lock.release()
        return False

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    @contextlib.contextmanager
    def held(self, *, limit: float = math.inf, needed: bool = False) -> Iterator[bool]:
        """Hold the lock in this context, and give signs of life. Yield whether it is held.

        Wait for at most `PATIENCE_S` without a sign of life. Then raise :class:`HeldError` if the
        lock is ``needed``; else say so and go on without the lock, because work whose result is
        renamed into place may be done twice. After ``limit`` seconds the signs of life end: work
        that takes longer counts as hanging.
        """
        try:
            is_held = self.acquire(PATIENCE_S)
        except HeldError as error:
            if needed:
                raise
            print(f"{error}; it is not waited for any longer", file=sys.stderr, flush=True)
            # No signs of life: they would be taken for signs of the silent holder.
            is_held, limit = False, 0.0
        # In a folder without locks, these signs are all that other processes see.
        done = threading.Event()
        thread = threading.Thread(target=self._live, args=(done, limit), daemon=True)
        thread.start()
        try:
            yield is_held
        finally:
            done.set()
            thread.join()
            self.release()

    def holder(self) -> str:
        """Return the holder that the file names, or "another process"."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (text := self.path.read_text()).startswith("process "):
                return text.splitlines()[0]
        return "another process"

    def _live(self, done: threading.Event, limit: float) -> None:
        until = time.monotonic() + limit
        while not done.wait(BEAT_S) and time.monotonic() < until:
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def _sign(self) -> int | None:
        with contextlib.suppress(OSError):
            return self.path.stat().st_mtime_ns
        return None
