"""Whether a process waits for others, and since when: who does not is the one they wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from maml.processes.clock import Clock


class Waits:
    """The waits of this process, in each of its threads."""

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
