"""The time in which a process ran, and how long it waits for others by that time."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

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


class Waits:
    """Whether this process waits for others, and since when; else it is the one they wait for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[object, float] = {}
        # Whether it does only what it is called for, and the calls that it is in.
        self._serves, self._calls = False, set[object]()

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Let a wait for others last no longer than ``--timeout``: then this process ends."""
        wait = object()
        self._since[wait] = self._clock.now()
        try:
            yield
        finally:
            del self._since[wait]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Let this process count as one that waits for others, but for the time of their calls."""
        self._serves = True
        try:
            yield
        finally:
            self._serves = False

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """While another process has called this one, let it count as one that is at work."""
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def __bool__(self) -> bool:
        return bool(self._since or (self._serves and not self._calls))

    def longest(self) -> float:
        """Return the seconds of the longest `limited` wait so far."""
        now = self._clock.now()
        return now - min(list(self._since.values()), default=now)


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return ``action()``, or ``otherwise`` if it fails or takes longer: a store may be frozen."""
    found = [otherwise]

    def act() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            found[0] = action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]
