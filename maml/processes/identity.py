"""Which process it is, beyond its number, and whether the kernel has killed one for memory.

Numbers are used again, and every host has its own.
"""

import os
import platform
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

KILLED = 2.0
"""Seconds that a killed process takes at most to be gone."""


class Identity(NamedTuple):
    """A process. ``place``: the boot and the container in which its number counts."""

    host: str
    place: str
    pid: int
    since: str

    @classmethod
    def own(cls) -> "Identity":
        """Return this process's."""
        return cls(platform.node(), _place(), os.getpid(), started(os.getpid()))

    @property
    def is_near(self) -> bool:
        """Whether this process sees it among the processes of its own host."""
        return self.place == _place()

    def is_gone(self) -> bool:
        """Whether the process has ended, as far as can be told from here.

        Of another host, or another container of this one, nothing is known; what ran before this
        host was started is gone.
        """
        (boot, space), (own_boot, own_space) = self.place.split(), _place().split()
        if self.host != platform.node() or space != own_space:
            return False
        return boot != own_boot or started(self.pid) != self.since

    def is_stopped(self) -> bool:
        """Whether one that `is_near` was stopped by a signal (SIGSTOP, SIGTSTP)."""
        try:
            status = psutil.Process(self.pid).status()
        except psutil.Error:
            return False
        return status == psutil.STATUS_STOPPED and not self.is_gone()

    def kill(self) -> bool:
        """Kill one that `is_near`; return whether it was there."""
        if self.is_gone():
            return False
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED
        while not self.is_gone() and time.monotonic() < deadline:
            time.sleep(0.02)
        return True

    def resident(self) -> int:
        """Return the bytes of memory that one that `is_near` has; 0 if it is gone."""
        with suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0


def started(pid: int) -> str:
    """Return when a process of this host was started, the same whenever it is asked; "" if gone.

    Counted from the boot where the system tells: the clock may be set meanwhile.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # Behind the name, which may hold anything: the state, and 19 fields later the start.
        state, *fields = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except (OSError, ValueError, IndexError):
        pass
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


def _place() -> str:
    """Return the boot of this host and the space of process numbers, without spaces within."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = str(round(psutil.boot_time()))
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = "-"
    return f"{boot} {space}"


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
