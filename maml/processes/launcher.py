"""What has started this process, torchrun or launch/local, and what happens when it is gone.

Nobody would end its processes then: they would train on beside those that take their place.
"""

import contextlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable

LOOK = 0.25
"""Seconds between two looks at the launcher."""

ENDS = 30.0
"""Seconds in which a process has ended whose launcher is gone."""

LOCAL = "launch/local by process "
"""How the name of a start begins that launch/local gives it; what follows is its process id."""

STORE = "MAML_STORE_LISTENER"
"""The variable in which launch/local says on which file descriptor rank 0's store may listen."""

MET = "MAML_ALL_HAVE_MET"
"""The variable in which launch/local says to which file descriptor rank 0 writes, once all watch
over each other: from then on they end by themselves what must end."""


def _end(line: str) -> None:
    """Say it once a host, and end: nothing has begun that could be saved."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(1)


_action: Callable[[str], None] = _end
_gone = threading.Event()


def watch_launcher() -> None:
    """Look from here on whether the launcher lives, if there is one: call it first of all.

    Until `when_lost` says what is to be done, this process ends when it is gone.
    """
    start = os.environ.get("TORCHELASTIC_RUN_ID")
    if start is None:
        return
    parent = os.getppid()
    pid, kind = parent, "torchrun"
    if start.startswith(LOCAL):
        pid, kind = int(start.removeprefix(LOCAL)), "launch/local"
    name = f"the launcher ({kind}, host {platform.node()}, pid {pid})"
    if pid != parent:
        _end(f"{name} was killed")
    if _store_is_gone():  # and a parent that has adopted this process may have that number
        _end("the launcher (torchrun) is gone: its store refuses connections")
    threading.Thread(target=_watch, args=(pid, f"{name} was killed"), daemon=True).start()


def when_lost(action: Callable[[str], None]) -> None:
    """Let ``action`` be called in a thread, with the line for it, once the launcher is gone."""
    global _action
    _action = action


def let_it_be_named() -> None:
    """Do not return if the launcher is gone: whatever else fails then is no cause of its own.

    Its sockets close a moment before the system gives its processes another parent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and _gone.wait(4 * LOOK):
        time.sleep(ENDS)


def say_all_have_met() -> None:
    """On rank 0: tell the launcher, if it asks."""
    descriptor = os.environ.pop(MET, None)
    if descriptor is not None:
        with contextlib.suppress(OSError), os.fdopen(int(descriptor), "wb") as told:
            told.write(b"1")


def launcher_holds_store() -> bool:
    """Whether the store is torchrun's: it outlives the processes, and their restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _watch(pid: int, line: str) -> None:
    while os.getppid() == pid:
        time.sleep(LOOK)
    _gone.set()
    _action(line)


def _store_is_gone() -> bool:
    """Say so if the launcher had opened a store, as torchrun does first, which now refuses."""
    where = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    if not (launcher_holds_store() and all(where)):
        return False
    try:
        socket.create_connection((where[0], int(where[1])), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass  # What else is wrong with the address is said later, by whoever needs it.
    return False
