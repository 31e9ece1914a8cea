"""Stop signals, kept until the run can end in good order."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

PATIENCE = 10.0
"""After a stop signal, a step may take this many more seconds. Launchers kill after 30."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop a run. A terminal sends SIGHUP when it is closed or loses its connection."""


def heeded() -> list[signal.Signals]:
    """Return the `SIGNALS` that stop this process, without those that nohup or a shell disables.

    SIGINT and SIGTERM always stop it, although shells let background jobs ignore SIGINT.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    return [n for n in SIGNALS if n in always or signal.getsignal(n) != signal.SIG_IGN]


def exit_code(name: str) -> int:
    """Return the exit code of a process that a signal has stopped, as shells define it."""
    return 128 + signal.Signals[name]


def name_of(number: int) -> str:
    """Return a signal's name, or "signal 35": most real-time signals have only a number."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


class StopRequest:
    """One of `SIGNALS`, kept until the loop can end in good order; a second SIGINT interrupts."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._heeded = threading.Event()

    def __bool__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Install handlers for the `heeded` signals; call this in the main thread."""
        came: list[int] = []

        def handle(number: int, frame: object) -> None:
            # `signal` may come from another rank, so only what came here makes a SIGINT the second.
            if came and number == signal.SIGINT:
                raise KeyboardInterrupt
            came.append(number)
            self.signal = self.signal or name_of(number)

        for number in heeded():
            signal.signal(number, handle)

    def heed(self) -> None:
        """Note that the process is ending in good order, so that `hurried` calls no action."""
        self._heeded.set()

    @contextlib.contextmanager
    def hurried(self, action: Callable[[str], None]) -> Iterator[None]:
        """Call ``action(name)`` in a thread if a signal is not heeded within `PATIENCE` seconds.

        The main thread must enter this. It may be inside one long operation, where Python handles
        no signal. So the signal itself wakes the other thread, through a pipe.
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
            # A signal handed on from another rank sets `signal`, but writes no byte to the pipe.
            ready, _, _ = select.select([reader], [], [], 0.5)
            came = os.read(reader, 64) if ready else b""
            name = self.signal or next((signal.Signals(n).name for n in came if n in SIGNALS), None)
        if name is not None and not self._heeded.wait(PATIENCE):
            action(name)
