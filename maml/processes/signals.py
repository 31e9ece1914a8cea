"""Stop signals, remembered until they can be heeded."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

PATIENCE = 10.0
"""Seconds that a step may still take once a stop signal has come. Launchers kill after 30."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """SIGINT or SIGTERM, remembered until the loop can end in good order.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._heeded = threading.Event()

    def __bool__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Take the handlers of SIGINT and SIGTERM; call it in the main thread."""

        def handle(number: int, frame: object) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number).name

        for number in SIGNALS:
            signal.signal(number, handle)

    def heed(self) -> None:
        """Say that the process is ending in good order: nobody needs to hurry it."""
        self._heeded.set()

    @contextlib.contextmanager
    def hurried(self, action: Callable[[str], None]) -> Iterator[None]:
        """Call ``action(name)`` in a thread if a signal is not heeded within `PATIENCE` seconds.

        The main thread may be deep in one long operation, where Python handles no signal: the
        thread is woken by the signal itself. Enter it in the main thread.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._hurry, args=(reader, action), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.heed()
            signal.set_wakeup_fd(before)
            thread.join()
            os.close(reader)
            os.close(writer)

    def _hurry(self, reader: int, action: Callable[[str], None]) -> None:
        name: str | None = None
        while name is None and not self._heeded.is_set():
            # Another rank may hand its signal on: `signal` is then set, and no byte comes.
            ready, _, _ = select.select([reader], [], [], 0.5)
            came = os.read(reader, 64) if ready else b""
            name = self.signal or next((signal.Signals(n).name for n in came if n in SIGNALS), None)
        if name is not None and not self._heeded.wait(PATIENCE):
            action(name)
