"""Run a command for as long as somebody holds on to it: what launch/hosts starts on each host.

    ssh HOST python launch/tethered.py

The first line of standard input is JSON: the ``command``, and an ``environment`` to add. A secret
in it is on no command line, where others could read it. When standard input ends, because whoever
started this has stopped, was killed or is cut off, the command is told to stop (SIGTERM), and a
minute later killed. Nobody has to reach the host for that. The standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

PATIENCE = 60.0
"""Seconds to stop in. torchrun gives its workers 30."""


def main() -> int:
    """Run the command; return its exit code, or 128 + the signal that ended it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1  # let go before it began
        line += byte
    told = json.loads(line)
    process = subprocess.Popen(
        told["command"],
        env=os.environ | told["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    threading.Thread(target=_hold, args=(process,), daemon=True).start()
    assert process.stdout is not None
    heard = True
    while said := os.read(process.stdout.fileno(), 1 << 16):
        # Where nobody listens any more, the command must still be able to say its last words.
        if heard:
            try:
                while said:
                    said = said[os.write(1, said) :]
            except OSError:
                heard = False
    code = process.wait()
    return code if code >= 0 else 128 - code


def _hold(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of standard input; then end the command."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(main())
