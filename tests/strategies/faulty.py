"""``train_maml.py``, in which one rank goes wrong in the middle of a gradient, or waits in a phase.

``FAULT`` names a function here, ``FAULT_RANK`` the rank, ``FAULT_FILE`` a file: once the file is
there, the fault happens, and the file is removed. ``HOLD`` names one of `PHASES`: rank 0 makes
``HOLD_FILE`` when it comes to that phase, and goes on once the file is gone.
"""

import ctypes
import importlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import train_maml
from maml.processes.program import run_program

PHASES = {
    "start": ("maml.training.setup", "build_strategy"),
    "training": ("maml.trainer", "Trainer._step"),
    "validation": ("maml.training.testing", "Validations.validate"),
    "test": ("maml.training.testing", "test"),
    "tested": ("maml.run.directory", "write_json"),
    "drawing": ("maml.training.testing", "draw_curves"),
    "parting": ("maml.strategies.base", "Strategy._part"),
}
"""The function that rank 0 calls first in each phase. In "start", no process has met another one.
In "tested", rank 0 has printed the test's result."""

TEXT = "C:\\users\\new\nand a second line"
"""The text of an exception: two lines, with backslashes that look like escape sequences."""


def raises(*_: object) -> Any:
    """Fail as a user's own code may."""
    raise ValueError(TEXT)


def exits() -> None:
    """End the program as a user's own code may."""
    sys.exit(0)


def cannot_watch() -> None:
    """Fail in the thread that watches the other processes."""
    importlib.import_module("maml.processes.members").Members.look = raises


def has_no_heartbeat() -> None:
    """Fail in the thread of the heartbeat."""
    importlib.import_module("maml.processes.clock").Waits.__bool__ = raises


def holds_lock() -> None:
    """Hold the interpreter's lock, as a broken extension does: no other thread runs."""
    ctypes.PyDLL(None).sleep(3600)


def sleeps() -> None:
    """Hang as in a read from a lost file server: other threads run on, also the heartbeat's."""
    time.sleep(3600)


def disconnects() -> None:
    """Break all connections, as a network card that is reset."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def fills_memory() -> None:
    """Take memory until the kernel kills a process; this process is to be the one."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = []
    while True:
        held.append(b"x" * 2**24)
        time.sleep(0.05)


def go_wrong(fault: str, rank: str, file: Path) -> None:
    """Let ``fault`` happen to ``rank`` in a gradient, once the file is there."""
    worker = importlib.import_module("maml.worker").Worker
    right = worker.share

    def meta_gradient(*args: Any) -> Any:
        if os.environ["RANK"] == rank and file.exists():
            file.unlink()
            globals()[fault]()
        return right(*args)

    worker.share = meta_gradient


def hold(phase: str, file: Path) -> None:
    """Let this process wait where ``phase`` begins, the first time."""
    module, path = PHASES[phase]
    *names, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in names:
        owner = getattr(owner, part)
    right = getattr(owner, name)

    def held(*args: Any, **options: Any) -> Any:
        setattr(owner, name, right)
        file.touch()
        while file.exists():
            time.sleep(0.01)
        return right(*args, **options)

    setattr(owner, name, held)


if __name__ == "__main__":
    # As the program does it, before anything imports torch.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if "FAULT" in os.environ:
        fault, rank, file = (os.environ[name] for name in ("FAULT", "FAULT_RANK", "FAULT_FILE"))
        go_wrong(fault, rank, Path(file))
    if "HOLD" in os.environ and os.environ["RANK"] == "0":
        hold(os.environ["HOLD"], Path(os.environ["HOLD_FILE"]))
    run_program(train_maml.main, sys.argv[1:])
