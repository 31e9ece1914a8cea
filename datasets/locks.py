"""The program's file locks. Each file names the holder, and no process waits for ever.

The lock is the operating system's, so a killed process loses its lock. A working holder touches the
file every few seconds as a sign of life (a heartbeat). A stopped process, or a process on a lost
host, gives no sign of life. No torch is imported.
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

from filelock import FileLock, Timeout

PATIENCE_S = 60.0  # stop waiting for a holder that gave no sign of life for this long
BEAT_S = 5.0  # between two signs of life; a process that waits longer names the holder


class HeldError(TimeoutError):
    """Another process has the lock; the message names the process and the file."""


class Lock:
    """The lock of one file. A release keeps the file. Threads exclude each other, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Members of one group may share a folder.
        self._lock = FileLock(path, mode=0o664, thread_local=False, fallback_to_soft=False)

    def acquire(self, patience: float = 0.0) -> bool:
        """Wait while the holder gives signs of life, and then for ``patience`` seconds.

        Return whether this process has the lock. False: the folder does not support locks (some
        shared folders), or is not writable. Raise :class:`HeldError` if another process has it.
        """
        since, sign = time.monotonic(), self._sign()
        said = patience <= BEAT_S or os.environ.get("LOCAL_RANK", "0") != "0"
        while True:
            try:
                self._lock.acquire(timeout=min(patience, BEAT_S))
                break
            except Timeout:
                pass
            except OSError:
                return False
            if (now := self._sign()) != sign:
                since, sign = time.monotonic(), now
            elif time.monotonic() - since >= patience:
                silent = f", silent for {patience:.0f} s" if patience else ""
                raise HeldError(f"{self.path}: held by {self.holder()}{silent}")
            if not said:
                said = True
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
        """Hold the lock within this context, and give signs of life. Yield whether it is held.

        If the holder gives no sign of life for `PATIENCE_S`, print a message and go on without the
        lock. Two processes may do the same work if its result is renamed into place. If the
        lock is ``needed``, raise :class:`HeldError` instead. Work that takes more than ``limit``
        seconds counts as hanging, and its signs of life end.
        """
        has, is_ours = False, True
        try:
            has = self.acquire(PATIENCE_S)
        except HeldError as error:
            is_ours = False
            if needed:
                raise
            print(f"{error}; it is not waited for any longer", file=sys.stderr, flush=True)
        done = threading.Event()
        # Not of another's lock, which would seem to live. Without locks, this sign is all.
        args = done, limit if is_ours else 0.0
        thread = threading.Thread(target=self._live, args=args, daemon=True)
        thread.start()
        try:
            yield has
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
