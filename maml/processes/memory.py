"""Whether the kernel has killed for want of memory (Linux): to the others, it is a mere SIGKILL."""

from contextlib import suppress
from pathlib import Path

import psutil


class OutOfMemory:
    """Counts the processes of this host that the kernel kills from here on, for want of memory."""

    def __init__(self, counts: Path = Path("/proc/vmstat")) -> None:
        """``counts``: the kernel's, of all its control groups."""
        self._counts = counts
        self._before = self._kills()

    def cause(self, which: str, had: int | None) -> str:
        """Return what to add to the news of a killed process; "" if the kernel has killed none.

        ``had``: the bytes that it, or ``which`` process else, was last seen to have, if it was.
        """
        count = self._kills() - self._before
        if count <= 0:
            return ""
        killed = "1 process" if count == 1 else f"{count} processes"
        line = f": memory ran out, and the kernel killed {killed} of this host during this run"
        return line + (f"; {which} had {had / 2**30:.2f} GiB" if had else "")

    def _kills(self) -> int:
        with suppress(OSError, ValueError, KeyError):
            words = self._counts.read_text().split()
            return int(dict(zip(words[::2], words[1::2], strict=True))["oom_kill"])
        return 0


def resident(pid: int) -> int | None:
    """Return the bytes of memory that a process of this host has; None if it is gone."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return None
