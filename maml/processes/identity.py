"""Which process it is, beyond its number: numbers are used again, and every host has its own."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

import psutil


class Identity(NamedTuple):
    """A process. ``place``: the boot and the container in which its number counts."""

    host: str
    place: str
    pid: int
    since: str

    @classmethod
    def own(cls) -> Identity:
        """Return this process's."""
        return cls(platform.node(), _place(), os.getpid(), started(os.getpid()))

    def is_gone(self) -> bool:
        """Whether the process has ended, as far as can be told from here.

        Of another host, or another container of this one, nothing is known; what ran before this
        host was started is gone.
        """
        (boot, space), (own_boot, own_space) = self.place.split(), _place().split()
        if self.host != platform.node() or space != own_space:
            return False
        return boot != own_boot or started(self.pid) != self.since


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
