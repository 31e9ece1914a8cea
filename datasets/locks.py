"""The program's file locks: each says who holds it, and nobody waits for one without end.

The lock is the operating system's: that of a killed process is gone with it. Its file names its
holder, and changes every few seconds for as long as the holder works: these are its signs of life.
A process that was stopped gives none, nor does one on a host that is gone. No torch is imported.
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

PATIENCE_S = 60.0  # a holder that has given no sign of life for so long is waited for no more
BEAT_S = 5.0  # between two signs of life; who waits for so long says for whom


class HeldError(TimeoutError):
    """Another process has the lock; the message names it and the file."""


class Lock:
    """The lock of one file, which stays when it is free. Threads exclude each other, too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)

    def acquire(self, patience: float = 0.0) -> bool:
        """Wait for as long as the holder gives signs of life, and then for ``patience`` seconds.

        Returns whether this process has it. False: this folder has no locks, as some that hosts
        share, or they cannot be written. Raises :class:`HeldError` if another process has it.
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
        """Return whether somebody has it now. ``OSError``: this folder has no locks."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return True
        self._lock.release()
        return False

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    @contextlib.contextmanager
    def held(self, *, limit: float = math.inf, needed: bool = False) -> Iterator[bool]:
        """Hold it within this context, and give signs of life. Yields whether it is held.

        After `PATIENCE_S` without a sign of another holder's it goes on without the lock, and says
        so: two may do the same work at once where its result is renamed into place. Where the lock
        is ``needed``, :class:`HeldError` is raised instead. Work that takes more than ``limit``
        seconds counts as hanging, and its signs end.
        """
        has = False
        try:
            has = self.acquire(PATIENCE_S)
        except HeldError as error:
            if needed:
                raise
            print(f"{error}; it is not waited for any longer", file=sys.stderr, flush=True)
        done = threading.Event()
        thread = threading.Thread(target=self._live, args=(done, limit), daemon=True)
        thread.start()
        try:
            yield has
        finally:
            done.set()
            thread.join()
            self.release()

    def holder(self) -> str:
        """Return who holds it, as far as its file says so."""
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
