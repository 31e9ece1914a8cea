"""Takes network namespaces down, with everything in them, when its standard input ends.

python tests/keeper.py NAMESPACE …

Whoever made the namespaces holds the other end of the pipe, so that they go when it lets go, when
it fails and when it is killed alike. The standard library alone: it must be up at once.
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
