"""Train with several workers on this host; other hosts cannot reach them.

    launch/local PRESET [--workers N] [--restarts N] [--flag value …]

torchrun's key-value store listens at every address of a host, and anyone who reaches it can run
code in the job. Here the store, RPC and gloo listen in a network of the job's own, which no other
user of the host can enter (`maml.processes.namespaces`). torchrun ends all workers when one is
lost. Here the workers decide, once all have met: a run that can do without the lost worker
continues. With ``--restarts``, workers that have all ended start again, and continue from the last
checkpoint.
"""

import contextlib
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from maml.config.cli import parse
from maml.config.parser import Parser, at_least
from maml.processes.identity import OutOfMemory
from maml.processes.launcher import LOCAL, MET, STORE
from maml.processes.namespaces import NETWORK, new_network
from maml.processes.program import run_program
from maml.processes.signals import heeded, name_of

TRAIN = Path(__file__).resolve().parents[1] / "train_maml.py"

LOOK = 0.1
"""Seconds between two looks at the workers."""

PATIENCE = 30.0
"""Seconds that workers have to end after a signal. Then the launcher kills them."""

AFTER = 30.0
"""Seconds that workers have to end by themselves after rank 0 has ended."""


def main(arguments: list[str]) -> int:
    """Start the workers; return the exit code of the first that failed, or 0."""
    workers, restarts, others = read(arguments)
    if workers is None:
        import torch

        workers = torch.accelerator.device_count() or len(os.sched_getaffinity(0))
    # As torchrun does. The program itself divides the cores among its workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signals: list[int] = []
    for number in heeded():
        signal.signal(number, lambda number, _: signals.append(number))
    for attempt in range(restarts + 1):
        started = _Workers(workers, attempt, others)
        try:
            code = started.wait(signals)
        finally:
            started.kill()
        if code == 0 or started.stopped_by:
            break
    return code


def read(arguments: list[str]) -> tuple[int | None, int, list[str]]:
    """Return the number of workers (or None) and of restarts, and all other flags, checked."""
    epilog = "All other flags are those of train_maml.py: python train_maml.py --help"
    parser = Parser(prog="launch/local", description=__doc__, epilog=epilog)
    text = "processes (default: GPUs, else cores)"
    parser.add_argument("--workers", type=at_least(1), help=text)
    text = "how often to start again (default: 0)"
    parser.add_argument("--restarts", type=at_least(0), default=0, help=text)
    ours, others = parser.parse_known_args(arguments)
    if not others:
        parser.print_help()
        parser.exit(2)
    # Check the flags here, so that an error appears once, before any worker starts.
    parse(others)
    return ours.workers, ours.restarts, others


class _Workers:
    """The workers of one start. Rank 0 holds the store, and inherits the listening socket."""

    def __init__(self, count: int, attempt: int, arguments: list[str]) -> None:
        try:
            listener, network = new_network()
        except OSError as error:
            listener, network = socket.create_server(("127.0.0.1", 0), backlog=2048), []
            why = f"the system allows no network namespace ({error.strerror})"
            line = f"other users of this host may run code in this training: {why}"
            print(f"launch/local: {line}; see docs/hosts.md", file=sys.stderr)
        self._met, told = os.pipe()
        self._said, self._alone_since = b"", 0.0
        os.set_blocking(self._met, False)
        size, port = str(count), str(listener.getsockname()[1])
        common = os.environ | {
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"{LOCAL}{os.getpid()}",
            "TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        if network:
            common[NETWORK] = " ".join(map(str, network))
        inherited = {STORE: listener.fileno(), MET: told}
        self._processes: list[subprocess.Popen[bytes]] = []
        with listener, os.fdopen(told):
            for rank in map(str, range(count)):
                handles = {} if self._processes else inherited
                self._processes.append(subprocess.Popen(
                    [sys.executable, str(TRAIN), *arguments],
                    env=common | {name: str(fd) for name, fd in handles.items()}
                    | {"RANK": rank, "LOCAL_RANK": rank},
                    pass_fds=[*handles.values(), *network],
                ))  # fmt: skip
        for namespace in network:
            os.close(namespace)
        self._failed: subprocess.Popen[bytes] | None = None
        self._memory = OutOfMemory()
        self.stopped_by = 0

    def wait(self, signals: list[int]) -> int:
        """Wait until all have ended, and pass ``signals`` on; return the first failure's exit code.

        Return 0 if rank 0 returned 0: then the run is done, even if another worker was lost.
        """
        deadline = math.inf
        while self._living():
            if signals:
                number = signals.pop(0)
                # A terminal sends Ctrl-C to the workers, too. A second SIGINT ends them unsaved.
                is_ctrl_c = number == signal.SIGINT and not self.stopped_by
                self.stopped_by = number
                deadline = min(deadline, self._end(signal.SIGTERM if is_ctrl_c else number))
            elif deadline == math.inf and self._must_end():
                deadline = self._end(signal.SIGTERM)
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(LOOK)
        if self.stopped_by:
            return 128 + self.stopped_by
        if self._failed is None or self._processes[0].returncode == 0:
            return 0
        return self._code(self._failed)

    def kill(self) -> None:
        """Kill the workers that still run."""
        for process in self._living():
            process.kill()
            process.wait()

    def _living(self) -> list[subprocess.Popen[bytes]]:
        """Return the workers that still run; remember which worker failed first."""
        living = [process for process in self._processes if process.poll() is None]
        failed = [process for process in self._processes if process.returncode]
        self._failed = self._failed or (failed[0] if failed else None)
        return living

    def _must_end(self) -> bool:
        """Return whether to end the others because a worker has ended: they would wait for it."""
        if self._processes[0].returncode is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() > self._alone_since + AFTER:
            return True
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self._met, 1)
        # Once all have met, the workers themselves notice when another worker ends.
        return self._failed is not None and not self._said

    def _end(self, number: int) -> float:
        """Send all workers a signal to end; return the time at which to kill the rest."""
        for process in self._living():
            process.send_signal(number)
        return time.monotonic() + PATIENCE

    def _code(self, failed: subprocess.Popen[bytes]) -> int:
        """Print how a worker failed; return the exit code."""
        code: int = failed.returncode
        if code == 2:  # bad input, which the worker itself has reported
            return code
        by = name_of(-code) if code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            by += self._memory.cause("the largest process", largest)
        rank = self._processes.index(failed)
        print(f"launch/local: rank {rank} (pid {failed.pid}) ended {by}", file=sys.stderr)
        return code if code > 0 else 128 - code


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
