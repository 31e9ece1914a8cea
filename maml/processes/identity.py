"""Identify a process by more than its id, and count the processes killed for lack of memory.

A process id is not enough: systems reuse ids, and every host has its own ids.
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
"""Wait at most this many seconds until a killed process is gone."""


class Identity(NamedTuple):
    """A process. ``place``: the boot and the container in which its process id is valid."""

    host: str
    place: str
    pid: int
    since: str

    @classmethod
    def own(cls) -> "Identity":
        """Return this process's identity."""
        return cls(platform.node(), _place(), os.getpid(), started(os.getpid()))

    @property
    def is_near(self) -> bool:
        """Whether the process is in this host's boot and container: its id is valid here."""
        return self.place == _place()

    def is_gone(self) -> bool:
        """Return whether the process has ended, as far as this process can see.

        For another host or another container, return False. If the process ran before this host's
        last boot, return True.
        """
        (boot, space), (own_boot, own_space) = self.place.split(), _place().split()
        if self.host != platform.node() or space != own_space:
            return False
        return boot != own_boot or started(self.pid) != self.since

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP, SIGTSTP) stopped the process, which must be near."""
        try:
            status = psutil.Process(self.pid).status()
        except psutil.Error:
            return False
        return status == psutil.STATUS_STOPPED and not self.is_gone()

    def kill(self) -> bool:
        """Kill the process if it is near and still there; return whether it was."""
        if not self.is_near or self.is_gone():
            return False
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED
        while not self.is_gone() and time.monotonic() < deadline:
            time.sleep(0.02)
        return True

    def resident(self) -> int:
        """Return the bytes of memory of the process, which must be near; 0 if it is gone."""
        with suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0


def started(pid: int) -> str:
    """Return when a process of this host started, equal at every call; "" if it is gone.

    The time counts from the boot, because the system's clock may be set meanwhile.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # After the name, which may hold any characters: the state, and 19 fields later the start.
        state, *fields = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except (OSError, ValueError, IndexError):
        return ""


def _place() -> str:
    """Return this host's boot and namespace of process ids; the only blank separates the two."""
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
    """Counts the processes of this host that the kernel kills, from now on, for lack of memory."""

    def __init__(self, counts: Path = Path("/proc/vmstat")) -> None:
        """``counts``: the kernel's file of counters, which cover all control groups."""
        self._counts = counts
        self._before = self._kills()

    def cause(self, which: str, had: int | None) -> str:
        """Return what to append to the line about a killed process; "" if the kernel killed none.

        ``had``: the bytes of memory last seen for the process that ``which`` names, if known.
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
