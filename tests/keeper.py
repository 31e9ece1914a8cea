"""Remove network namespaces, with all processes in them, when standard input ends.

python tests/keeper.py NAMESPACE …

The process that made the namespaces holds the other end of the pipe. The namespaces go when that
process closes the pipe, fails or is killed. Only the standard library is used, to start fast.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 10.0


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True).stdout


def _kill_all(namespaces: list[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pids = [int(pid) for name in namespaces for pid in _ip("netns", "pids", name).split()]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main(namespaces: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    there = [name for name in namespaces if Path("/run/netns", name).exists()]
    _kill_all(there)
    for name in there:
        _ip("netns", "delete", name)


if __name__ == "__main__":
    main(sys.argv[1:])
