"""A stopwatch for the activities of a process."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Adds up the seconds that all threads of this process spend on each activity.

    A GPU works asynchronously, so the seconds only include the time to launch its work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Add the time of this context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            with self._lock:
                self._seconds[what] = self._seconds.get(what, 0.0) + took

    def following(self, what: str, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items``; add the time that each takes to come."""
        iterator = iter(items)
        while True:
            with self.spent_on(what):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, and begin anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds
