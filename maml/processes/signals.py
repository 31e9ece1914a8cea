"""Stop signals, remembered until they can be heeded."""

import contextlib
import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterator

PATIENCE = 10.0
"""Seconds that a step may still take once a stop signal has come. Launchers kill after 30."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What stops a run. A terminal sends SIGHUP when it is closed, or its connection lost."""


def heeded() -> list[signal.Signals]:
    """Return the `SIGNALS` that stop this process: not what nohup or a shell lets it ignore.

    SIGINT stops it in any case: a shell lets every job in the background ignore that.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    return [n for n in SIGNALS if n in always or signal.getsignal(n) != signal.SIG_IGN]


def exit_code(name: str) -> int:
    """Return the exit code of a process that a signal has stopped, as shells have it."""
    return 128 + signal.Signals[name]


def leave_lost_terminal() -> None:
    """Let what is printed go nowhere where the terminal is gone: it would be an error each time."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


class StopRequest:
    """One of `SIGNALS`, kept until the loop can end in good order; a second SIGINT interrupts."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._heeded = threading.Event()

    def __bool__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Take the handlers of the signals that are `heeded`; call it in the main thread."""

        def handle(number: int, frame: object) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            leave_lost_terminal()
            self.signal = signal.Signals(number).name

        for number in heeded():
            signal.signal(number, handle)

    def heed(self) -> None:
        """Say that the process is ending in good order: nobody needs to hurry it."""
        self._heeded.set()

    @contextlib.contextmanager
    def hurried(self, action: Callable[[str], None]) -> Iterator[None]:
        """Call ``action(name)`` in a thread if a signal is not heeded within `PATIENCE` seconds.

        The main thread, which enters it, may be deep in one long operation, where Python handles no
        signal: the thread is woken by the signal itself.
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
            leave_lost_terminal()
            action(name)
