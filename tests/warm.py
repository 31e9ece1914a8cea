"""Start Python's commands as forks of one process that has imported everything already.

Importing torch and the program takes most of the processor time of a tiny run. A fork has the
imports at once. Session, environment, arguments, output and exit code are its own, as a new
process's are. ``Warm`` replaces `subprocess.Popen`. `tests.launching` decides what may be a fork.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

REPO = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    *("torch._dynamo", "torch.distributed.rpc", "matplotlib.pyplot"),
    *("maml.trainer", "maml.strategies", "tests.warm"),
])  # fmt: skip
# What the process that forks must have, because its imports read it.
ITS_OWN = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


class Warm:
    """A Python command that starts with all imports done. It has the interface of a `Popen`."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], out: Path, err: Path
    ) -> None:
        files = (os.devnull, os.O_RDONLY), (out, os.O_WRONLY), (err, os.O_WRONLY)
        given = command[1:], cwd, dict(env), files
        self._process = FORKS.Process(target=_become, args=given, daemon=True)
        with mock.patch.dict(os.environ, ITS_OWN):
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code at its end."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def _become(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], files: Sequence[tuple[Path, int]]
) -> None:
    """Run the command in this process, with its session, environment, folder and files."""
    multiprocessing.set_start_method(None, force=True)  # as in a process that nothing has forked
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    # TorchOpt caches there what it has read from the environment.
    sys.modules["torchopt.distributed"].get_world_info.world_info = None
    # Its hooks of rank zero alone hold the rank that the process had when they were defined.
    for hook in vars(sys.modules["maml.run.log"].RunLog).values():
        names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, getattr(hook, "__closure__", None) or (), strict=True):
            if name == "world_rank":
                cell.cell_contents = int(os.environ.get("RANK", "0"))
    os.chdir(cwd)
    for number, (path, flags) in enumerate(files):
        os.dup2(os.open(path, flags), number)
    first, *rest = command
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")
