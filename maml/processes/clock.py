"""A clock of the time in which a process ran, and the waits for others by this clock."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

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
        # Of each body that runs now: its kind, and since when.
        self._open: dict[object, tuple[str, float]] = {}

    @contextlib.contextmanager
    def during(self, kind: Literal["limited", "serving", "called"]) -> Iterator[None]:
        """Count the body as a wait for others; if ``called``, as the work of another's call.

        A ``limited`` wait beyond ``--timeout`` ends this process. A process that is ``serving``
        waits for others, except while it executes their calls.
        """
        body = object()
        self._open[body] = kind, self._clock.now()
        try:
            yield
        finally:
            del self._open[body]

    def _since(self, kind: str) -> list[float]:
        return [since for of, since in list(self._open.values()) if of == kind]

    def __bool__(self) -> bool:
        serves = self._since("serving") and not self._since("called")
        return bool(self._since("limited") or serves)

    def longest(self) -> float:
        """Return how many seconds the oldest open limited wait has lasted; 0 without one."""
        now = self._clock.now()
        return now - min(self._since("limited"), default=now)


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return ``action()``; ``otherwise`` if it fails or is too slow, as with a frozen store."""
    found = [otherwise]

    def act() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            found[0] = action()

    thread = threading.Thread(target=act, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(seconds)
    return found[0]
