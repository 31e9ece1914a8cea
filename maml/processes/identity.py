"""Identify a process by more than its id, and count the processes killed for lack of memory.

A process id is not enough: systems reuse ids, and every host has its own ids.
"""

import functools
import os
import platform
import resource
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

    def keep_in_sight(self) -> None:
        """Open what the kernel tells of a near process: later no file descriptor may be free."""
        if self.is_near and self not in _in_sight:
            with suppress(OSError):
                _in_sight[self] = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY)

    def state(self) -> str:
        """Return the letter of the process's state (proc(5)), as far as this process can see it.

        "T" is stopped by a signal. "" has ended, also if it ran before this host's last boot. "?"
        is unknown: it is of another host or container, or no file descriptor is free to look.
        """
        (boot, space), (own_boot, own_space) = self.place.split(), _place().split()
        if self.host != platform.node() or space != own_space or not self.since:
            return "?"
        try:
            fields = _fields(self.pid, _in_sight.get(self)) if boot == own_boot else []
        except OSError:
            return "?"
        return fields[_STATE] if fields and fields[_START] == self.since else ""

    def is_gone(self) -> bool:
        """Return whether the process has ended, as far as this process can see."""
        return self.state() == ""

    def kill(self) -> bool:
        """Kill the process if it is seen to be there; return whether it was."""
        if self.state() in ("", "?"):
            return False
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED
        while not self.is_gone() and time.monotonic() < deadline:
            time.sleep(0.02)
        return True

    def resident(self) -> int:
        """Return the bytes of memory of the process, which must be near; 0 if they are unknown."""
        with suppress(OSError, IndexError):
            fields = _fields(self.pid, _in_sight.get(self))
            return int(fields[_PAGES]) * resource.getpagesize()
        return 0


_in_sight: dict[Identity, int] = {}
"""Open files that `_fields` reads."""

_STATE, _START, _PAGES = 0, 19, 21
"""Fields of `_fields`: the state, the start, and the pages of memory."""


def started(pid: int) -> str:
    """Return when a process of this host started, equal at every call; "" if it cannot be read.

    The time counts from the boot, because the system's clock may be set meanwhile.
    """
    with suppress(OSError, IndexError):
        return _fields(pid)[_START]
    return ""


def _fields(pid: int, file: int | None = None) -> list[str]:
    """Return a process's fields in /proc/PID/stat from its state on; [] if it is gone.

    ``file``: a descriptor of this file, if one was opened before. It never tells of a later process
    with this id. OSError: the file cannot be read, as without free file descriptors.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes() if file is None else os.pread(file, 4096, 0)
    except (FileNotFoundError, ProcessLookupError):
        return []
    # After the name, which may hold any characters.
    fields = stat.rpartition(b")")[2].decode().split()
    return fields if fields and fields[_STATE] not in "ZX" else []


@functools.cache  # for ever the same, and later no file descriptor may be free
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
