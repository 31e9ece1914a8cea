"""A clock that stands still while its process does."""

from __future__ import annotations

import threading
import time

LONGEST = 2.0
"""Seconds that the clock moves on at most between two looks at it."""


class Clock:
    """Seconds in which this process ran.

    A scheduler may suspend a whole job for hours. When it goes on, nobody was silent: all stood
    still. By this clock the suspension took `LONGEST` seconds, whatever it took by others. So it
    must be looked at more often than that, as by `maml.processes.liveness`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen, self._seconds = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds since the clock was made, without those of suspensions."""
        with self._lock:
            seen = time.monotonic()
            self._seconds += min(seen - self._seen, LONGEST)
            self._seen = seen
            return self._seconds
