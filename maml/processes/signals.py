"""Stop signals, remembered until they can be heeded."""

from __future__ import annotations

import signal


class StopRequest:
    """SIGINT or SIGTERM, remembered until the loop can end in good order.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Take the handlers of SIGINT and SIGTERM; call it in the main thread."""

        def handle(number: int, frame: object) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number).name

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)
