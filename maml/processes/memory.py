"""Whether the kernel has killed for want of memory (Linux): to the others, it is a mere SIGKILL."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

GIB = 2**30


class OutOfMemory:
    """Counts the processes that the kernel kills from here on, as it runs out of memory."""

    def __init__(self, root: Path = Path("/")) -> None:
        """``root``: where ``proc`` and ``sys`` are."""
        self._root = root
        self._before = _kills(root)

    def cause(self, which: str, had: int | None) -> str:
        """Return what to add to the news of a killed process; "" if the kernel has killed none.

        Args:
            which: "it", or another process of which it is known how much memory it had.
            had: The bytes that it was last seen to have, if it was.
        """
        for place, count in _kills(self._root).items():
            if count > self._before.get(place, count):
                n = count - self._before[place]
                killed = "1 process" if n == 1 else f"{n} processes"
                line = f": memory ran out {place}, and the kernel killed {killed} during this run"
                return line + (f"; {which} had {had / GIB:.2f} GiB" if had else "")
        return ""


def resident(pid: int) -> int | None:
    """Return the bytes of memory that a process of this host has; None if it is gone."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return None


def _kills(root: Path) -> dict[str, int]:
    """Return how many processes were killed, by where memory ran out; the narrowest comes first."""
    found = {}
    for place, file in (
        ("in this control group", _of_group(root)),
        ("on this host", "proc/vmstat"),
    ):
        with suppress(OSError, ValueError, KeyError):
            words = (root / file).read_text().split()
            found[place] = int(dict(zip(words[::2], words[1::2], strict=True))["oom_kill"])
    return found


def _of_group(root: Path) -> str:
    """Return the file in which this process's control group counts, of version 1 or 2.

    A container may see its own group as the root of all, whatever ``/proc`` calls it.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number != "0" and "memory" not in controllers.split(","):
                continue
            base, name = "sys/fs/cgroup", "memory.events"
            if number != "0":
                base, name = f"{base}/memory", "memory.oom_control"
            for file in (f"{base}{group}/{name}", f"{base}/{name}"):
                if (root / file).is_file():
                    return file
    return "none"
