"""Train on the hosts that a file lists, over ssh.

    launch/hosts FILE PRESET [--port N] [--ssh COMMAND] [--flag value …]

FILE has a host a line, and perhaps its number of processes: ``node7 8``. ``#`` begins a comment.
torchrun is started on each. All meet at the first host, where rank 0 is. What they print comes
home, each line with its host. When one ends, all are ended; so they are at Ctrl-C, which saves a
checkpoint.

Every host needs this folder and its environment at the same path, and must be let in without a
password. The hosts open ports to each other, and whoever reaches these can run code as you: use it
in a network that you trust.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from maml.config.cli import parse
from maml.errors import UserError
from maml.processes.program import run_program

REPO = Path(__file__).resolve().parents[1]
GRACE = 15.0
"""Seconds in which hosts may end by themselves, once one has failed: they say why."""
DONE_GRACE = 120.0
"""The same, once one has ended well: rank 0 may still write."""
PATIENCE = 90.0
"""Seconds that a host has once it is let go; it kills what is there after 60 itself."""
FORWARDED = ("MAML_", "WANDB_", "NCCL_", "GLOO_", "TP_", "PYTHONPATH")
"""How the names of variables begin that the hosts get, too."""


class Host(NamedTuple):
    """A line of the file. ``slots``: how many processes; ``auto``: its GPUs, else its cores."""

    name: str
    slots: str


def read_hosts(path: Path) -> list[Host]:
    """Return the hosts that a file lists, in its order.

    Raises:
        UserError: naming the file and the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, slots = words[0], words[1] if len(words) > 1 else "auto"
        # ssh would take what begins with a dash for a flag of its own.
        whole = slots == "auto" or (slots.isdecimal() and int(slots) > 0)
        if len(words) > 2 or not whole or name.startswith("-"):
            raise UserError(f"{path}, line {number}: {line.strip()!r} is not `host [processes]`")
        if name in [host.name for host in hosts]:
            raise UserError(f"{path}, line {number}: {name} is there twice")
        hosts.append(Host(name, slots))
    if not hosts:
        raise UserError(f"{path}: no hosts")
    return hosts


def main(arguments: list[str]) -> int:
    """Start torchrun on every host; return the exit code of the first that failed, or 0."""
    hosts, port, ssh, others = read(arguments)
    return _Run(hosts, port, ssh, others).wait()


def read(arguments: list[str]) -> tuple[list[Host], int, list[str], list[str]]:
    """Return the hosts, the port, the command of ssh, and all other flags, which are checked.

    Raises:
        UserError: for a file or a flag that cannot work.
        SystemExit: after the help.
    """
    parser = argparse.ArgumentParser(
        prog="launch/hosts", description=__doc__, add_help=False, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are those of train_maml.py: python train_maml.py --help",
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="say this")
    parser.add_argument("--port", default="29500", help="of the first host (default: 29500)")
    parser.add_argument("--ssh", default="ssh", help="OpenSSH's, with flags (default: ssh)")
    own, others = parser.parse_known_args(arguments)
    if own.help or len(others) < 2:
        parser.print_help()
        raise SystemExit(0 if own.help else 2)
    if not own.port.isdecimal() or not 0 < int(own.port) < 65536:
        raise UserError(f"--port {own.port}: must be 1 to 65535")
    hosts = read_hosts(Path(others[0]))
    # What is wrong with a flag is said once, and before anything is started.
    parse(others[1:])
    return hosts, int(own.port), shlex.split(own.ssh), others[1:]


class _Run:
    """The hosts' ends of ssh."""

    def __init__(
        self, hosts: Sequence[Host], port: int, ssh: Sequence[str], arguments: Sequence[str]
    ) -> None:
        self._stopped: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        self._printing = threading.Lock()
        repo, python = shlex.quote(str(REPO)), shlex.quote(sys.executable)
        far = f"cd {repo} && exec {python} launch/tethered.py"
        options = ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10"]
        environment = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
        # Only so that torchrun does not warn: the program shares the cores out among its workers.
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        self._ends: dict[str, subprocess.Popen[bytes]] = {}
        self._readers = []
        for rank, host in enumerate(hosts):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={len(hosts)}", f"--node-rank={rank}"),
                f"--nproc-per-node={host.slots}",
                *(f"--master-addr={hosts[0].name.rpartition('@')[2]}", f"--master-port={port}"),
                *("train_maml.py", *arguments),
            ]
            try:
                # In a session of its own: Ctrl-C is for us alone to pass on.
                end = subprocess.Popen(
                    [*ssh, *options, host.name, far],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._let_go()
                raise UserError(f"--ssh {ssh[0] if ssh else ''}: {error.strerror}") from None
            self._ends[host.name] = end
            reader = threading.Thread(target=self._print, args=(host.name, end), daemon=True)
            reader.start()
            self._readers.append(reader)
            assert end.stdin is not None
            told = {"command": torchrun, "environment": environment}
            # It may have ended already, and says why.
            with contextlib.suppress(OSError):
                end.stdin.write(json.dumps(told).encode() + b"\n")
                end.stdin.flush()

    def wait(self) -> int:
        """Wait until all have ended; end them when one has, or at a signal."""
        deadline = float("inf")
        let_go = False
        first: tuple[str, int] | None = None
        while running := [end for end in self._ends.values() if end.poll() is None]:
            if first is None and len(running) < len(self._ends):
                ended = {name: end.returncode for name, end in self._ends.items()
                         if end.returncode is not None}  # fmt: skip
                first = max(ended.items(), key=lambda item: item[1] != 0)
                deadline = time.monotonic() + (GRACE if first[1] else DONE_GRACE)
                if first[1] and not self._stopped:
                    self._say(f"{first[0]} has failed; so the others are ended")
            if len(self._stopped) > 1 or (let_go and time.monotonic() > deadline):
                for end in running:
                    end.kill()
            elif not let_go and (self._stopped or time.monotonic() > deadline):
                self._let_go()
                let_go, deadline = True, time.monotonic() + PATIENCE
            time.sleep(0.1)
        for reader in self._readers:
            reader.join(5.0)
        if self._stopped:
            self._say(f"stopped by {signal.Signals(self._stopped[0]).name}")
            return 128 + self._stopped[0]
        codes = {name: end.returncode for name, end in self._ends.items()}
        if first is None or not first[1]:
            first = next(((name, code) for name, code in codes.items() if code), None)
        if first is None:
            return 0
        why = " (ssh's own: it was not reached, or cut off)" if first[1] == 255 else ""
        self._say(f"{first[0]} ended with exit code {first[1]}{why}")
        return first[1] if first[1] > 0 else 128 - first[1]

    def _stop(self, number: int, frame: object) -> None:
        self._stopped.append(number)

    def _let_go(self) -> None:
        """Close what the hosts hold on to: each ends what it has started."""
        for end in self._ends.values():
            assert end.stdin is not None
            with contextlib.suppress(OSError):
                end.stdin.close()

    def _print(self, name: str, end: subprocess.Popen[bytes]) -> None:
        assert end.stdout is not None
        for line in end.stdout:
            with self._printing:
                print(f"[{name}] {line.decode(errors='replace').rstrip()}", flush=True)

    def _say(self, text: str) -> None:
        with self._printing:
            print(f"launch/hosts: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
