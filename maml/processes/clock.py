"""A clock of the time in which a process ran, and the waits for others by this clock."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

LONGEST = 2.0
"""The clock advances by at most this many seconds between two readings."""


class Clock:
    """A clock that counts the seconds in which this process ran.

    A scheduler may suspend a whole job for hours. No process was silent then, because all stood
    still. On this clock the suspension takes at most `LONGEST` seconds. So a thread must read the
    clock more often than every `LONGEST` seconds; `maml.processes.liveness` does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen, self._seconds = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds since the clock was made, without suspensions."""
        with self._lock:
            seen = time.monotonic()
            self._seconds += min(seen - self._seen, LONGEST)
            self._seen = seen
            return self._seconds


class Waits:
    """Tells whether this process waits for others, and since when; if not, others wait for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[object, float] = {}
        # Whether this process only serves calls, and the calls that it executes now.
        self._serves, self._calls = False, set[object]()

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Count the body as a wait for others; beyond ``--timeout``, this process ends."""
        wait = object()
        self._since[wait] = self._clock.now()
        try:
            yield
        finally:
            del self._since[wait]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count this process as waiting for others, except while it executes their calls."""
        self._serves = True
        try:
            yield
        finally:
            self._serves = False

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Count this process as working while it executes another process's call."""
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def __bool__(self) -> bool:
        return bool(self._since or (self._serves and not self._calls))

    def longest(self) -> float:
        """Return how many seconds the oldest open `limited` wait has lasted; 0 without one."""
        now = self._clock.now()
        return now - min(list(self._since.values()), default=now)


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return ``action()``; ``otherwise`` if it fails or is too slow, as with a frozen store."""
    found = [otherwise]

    def act() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            found[0] = action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]
