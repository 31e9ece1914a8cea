"""Watch the launcher that started this process (torchrun or launch/local), and end if it is gone.

Without this, processes without a launcher would train on next to those that replace them.
"""

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from maml.processes.speaker import speaks_for_host

LOOK = 0.25
"""Seconds between two looks at the launcher."""

ENDS = 30.0
"""A process whose launcher is gone ends within this many seconds."""

LOCAL = "launch/local by process "
"""The prefix of the run id that launch/local sets. The process id of launch/local follows."""

STORE = "MAML_STORE_LISTENER"
"""Environment variable of launch/local: the file descriptor on which rank 0's store may listen."""

MET = "MAML_ALL_HAVE_MET"
"""Environment variable of launch/local: the file descriptor to which rank 0 writes once all
processes watch each other. From then on they, not launch/local, decide which process must end."""


def _end(line: str) -> None:
    """Print the line once per host, and exit. There is nothing to save yet."""
    if speaks_for_host(f"launcher of {os.environ.get('MASTER_PORT')}"):
        print(f"error: {line}", file=sys.stderr, flush=True)
        time.sleep(4 * LOOK)  # until the others have seen that the line is printed
    os._exit(1)


_action: Callable[[str], None] = _end
_gone = threading.Event()


def watch_launcher() -> None:
    """Watch from now on whether the launcher (if any) lives; call this before anything else.

    If the launcher is gone, this process ends, unless `when_lost` has set another action.
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
    if _store_is_gone():  # torchrun died early; `parent` has adopted this process
        _end("the launcher (torchrun) is gone: its store refuses connections")
    threading.Thread(target=_watch, args=(pid, f"{name} was killed"), daemon=True).start()


def when_lost(action: Callable[[str], None]) -> None:
    """Call ``action(line)`` in a thread once the launcher is gone; the line tells how it ended."""
    global _action
    _action = action


def let_it_be_named() -> None:
    """Do not return if the launcher is gone: its loss is the cause of any other failure then.

    Wait a moment to find out. The launcher's sockets close before its processes get a new parent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and _gone.wait(4 * LOOK):
        time.sleep(ENDS)


def say_all_have_met() -> None:
    """On rank 0: write to the descriptor in `MET`, if launch/local has set one."""
    descriptor = os.environ.pop(MET, None)
    if descriptor is not None:
        with contextlib.suppress(OSError), os.fdopen(int(descriptor), "wb") as told:
            told.write(b"1")


def launcher_holds_store() -> bool:
    """Return whether torchrun holds the store, which then outlives the processes and restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def tell_launcher(line: str) -> None:
    """Write how this process ends to its error file (if any): torchrun shows the first one.

    Without it, torchrun names this process as the cause, and says nothing about the loss.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))


def _watch(pid: int, line: str) -> None:
    while os.getppid() == pid:
        time.sleep(LOOK)
    _gone.set()
    _action(line)


def _store_is_gone() -> bool:
    """Return whether the launcher's store, which torchrun opens first, now refuses connections."""
    where = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    if not (launcher_holds_store() and all(where)):
        return False
    try:
        socket.create_connection((where[0], int(where[1])), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass  # The code that uses the address will report any other fault in it.
    return False
