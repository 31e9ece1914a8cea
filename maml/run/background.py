"""A logger's work in a thread of its own: whatever it waits for, training does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

Row = dict[str, Any]


class Sink(Protocol):
    """Takes rows of numbers and pictures; may raise anything, and wait for anything."""

    def write(self, row: Row) -> None:
        """Take one row; its ``iteration`` is the step."""

    def picture(self, name: str, path: Path, iteration: int) -> None:
        """Take a picture, a file that stays where it is."""

    def close(self) -> None:
        """Flush and let go."""


class Background:
    """Makes a sink and feeds it. A server that does not answer holds up this thread alone."""

    def __init__(self, make: Callable[[], Sink], failed: Callable[[Exception], None]) -> None:
        """Begin.

        Args:
            make: Makes the sink.
            failed: Takes, in the thread, what the sink raised; there is no sink from then on.
        """
        self._make, self._failed, self._left = make, failed, False
        self._work: SimpleQueue[Callable[[Sink], None] | None] = SimpleQueue()
        # A daemon: it may hang in the library for ever, and must not hold up the process's end.
        self._thread = threading.Thread(target=self._feed, name="logger", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Hand over a row, at once."""
        self._work.put(lambda sink: sink.write(row))

    def picture(self, name: str, path: Path, iteration: int) -> None:
        """Hand over a picture, at once."""
        self._work.put(lambda sink: sink.picture(name, path, iteration))

    def close(self, seconds: float) -> bool:
        """Let the sink take what is left and close it; return whether it has, in time."""
        self._work.put(None)
        self._thread.join(seconds)
        self._left = self._thread.is_alive()
        return not self._left

    def _feed(self) -> None:
        try:
            sink = self._make()
            try:
                while (work := self._work.get()) is not None:
                    work(sink)
            finally:
                sink.close()
        except Exception as error:
            # A sink that was left behind has said all.
            if not self._left:
                self._failed(error)
