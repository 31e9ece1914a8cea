"""Choose the process of a host that prints a line, without any other process or a store.

When the store of a run is gone, the processes that are left cannot agree. Each host still needs one
line about the loss. The kernel gives a name to one process at a time, and frees it when that
process ends.
"""

import contextlib
import errno
import socket

_names: dict[str, socket.socket] = {}
"""The names that this process has. They end with it."""

_ready: list[socket.socket] = []


def prepare() -> None:
    """Open what a later `speaks_for_host` needs: then no file descriptor may be free."""
    if not _ready:
        with contextlib.suppress(OSError):
            _ready.append(socket.socket(socket.AF_UNIX))


def speaks_for_host(name: str) -> bool:
    """Return whether this process is the first living one of its host to take ``name``.

    If it cannot be known, return True: two lines are better than none. Containers with networks of
    their own count as hosts.
    """
    if name not in _names:
        try:
            taken = _ready.pop() if _ready else socket.socket(socket.AF_UNIX)
            taken.bind(f"\0maml {name}")  # an abstract address, which needs no file (unix(7))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        _names[name] = taken
    return True
