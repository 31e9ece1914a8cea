"""The program's file locks: each says who holds it, and nobody waits for one without end.

The lock is the operating system's: that of a killed process is gone with it. Its file holds a line
about its holder, and changes every few seconds for as long as the holder works: these are its signs
of life. A process that was stopped gives none, and neither does one on a host that is gone.

Nothing here imports torch.
"""

from __future__ import annotations

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

PATIENCE_S = 60.0
"""A holder that has given no sign of life for so long is waited for no more."""
BEAT_S = 5.0
"""Between two signs of life; who waits for so long says for whom."""
_OTHER = "another process"


class HeldError(TimeoutError):
    """Another process has the lock: ``str(error)`` names its file and that process."""


class Lock:
    """The lock of one file, taken once by one owner. Threads exclude each other as processes do."""

    def __init__(self, path: Path) -> None:
        """``path``: the lock's own file; it stays when the lock is free."""
        self.path = path
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)

    def acquire(self, patience: float = 0.0, *, take: bool = False) -> bool:
        """Wait for as long as the holder gives signs of life, and then for ``patience`` seconds.

        With ``take`` the lock is then taken away from it, after a line that says so: for work that
        two may do at once, since its result is renamed into place, but that one does for all.

        Returns whether this process has it. False: this folder has no locks, as some that hosts
        share, or they cannot be written.

        Raises:
            HeldError: another process still has it.
        """
        began = since = time.monotonic()
        sign, said = self._sign(), patience <= BEAT_S or os.environ.get("LOCAL_RANK", "0") != "0"
        while True:
            try:
                self._lock.acquire(timeout=min(patience, 1.0))
                break
            except Timeout:
                pass
            except OSError:
                return False
            now, before = time.monotonic(), sign
            if (sign := self._sign()) != before:
                since = now
            if now - since >= patience:
                silent = f", silent for {patience:.0f} s" if patience else ""
                found = f"{self.path}: held by {self.holder()}{silent}"
                if not take:
                    raise HeldError(found)
                _say(f"{found}; it is not waited for any longer")
                if not self._take_away(sign):
                    return False
                since = now
            elif not said and now - began >= BEAT_S:
                said = True
                _say(f"waiting for {self.path}: held by {self.holder()}")
        with contextlib.suppress(OSError):
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            self.path.write_text(f"process {os.getpid()} of {platform.node()} since {when}\n")
        return True

    def is_held(self) -> bool:
        """Return whether somebody has it now.

        Raises:
            OSError: this folder has no locks, as far as this process can tell.
        """
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
    def held(self, *, limit: float = math.inf, take: bool = True) -> Iterator[None]:
        """Hold it within this context, and give signs of life. It waits `PATIENCE_S` for others'.

        Args:
            limit: Seconds that the work may take. Then it counts as hanging, and the signs end.
            take: See `acquire`.

        Raises:
            HeldError: as `acquire`.
        """
        self.acquire(PATIENCE_S, take=take)
        done = threading.Event()
        thread = threading.Thread(target=self._live, args=(done, limit), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.release()

    def holder(self) -> str:
        """Return who holds it, as far as its file says so."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            first, *rest = self.path.read_text().splitlines() or [""]
            if first.startswith("process ") and len(first) < 200 and not rest:
                return first
        return _OTHER

    def _live(self, done: threading.Event, limit: float) -> None:
        until = time.monotonic() + limit
        while not done.wait(BEAT_S) and time.monotonic() < until:
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def _sign(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _take_away(self, sign: tuple[int, int] | None) -> bool:
        """Remove the file that is held, so that the next to come lock another one of its name.

        False: it cannot be removed. Two that do so at once may both get a lock.
        """
        # Another process that has waited may hold a new one already.
        if self._sign() == sign:
            try:
                self.path.unlink(missing_ok=True)
            except OSError:
                return False
        return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
