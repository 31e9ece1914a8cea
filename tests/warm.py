"""Start Python's commands as forks of one process that has imported everything already.

Importing torch and the program takes most of the processor time of a tiny run. A fork has the
imports at once. Session, environment, arguments, output and exit code are its own, as a new
process's are. ``Warm`` replaces `subprocess.Popen`. `tests.launching` decides what may be a fork.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torch._dynamo", "torch.distributed.rpc", "matplotlib.pyplot"),
    *("maml.trainer", "maml.strategies"),
)
REPO = Path(__file__).resolve().parents[1]


class _Server:
    """The process that forks, and the exit codes that it has reported."""

    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            **{"cwd": REPO, "env": environment, "start_new_session": True},  # type: ignore[arg-type]
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1},
        )
        self.ended: dict[int, int] = {}
        self._lines = [b""]  # the last of them is incomplete

    def fork(self, job: Mapping[str, Any]) -> int:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        while (pid := self.read()) is None:
            pass
        return pid

    def read(self) -> int | None:
        """Read a line: the process id of a child that has begun, or None for one that has ended."""
        self.hears(None)
        told = json.loads(self._lines.pop(0))
        if "began" in told:
            return int(told["began"])
        self.ended[told["ended"]] = told["code"]
        return None

    def hears(self, seconds: float | None) -> bool:
        """Return whether a line can be read within ``seconds``; None waits for one."""
        assert self.process.stdout is not None
        while len(self._lines) < 2 and select.select([self.process.stdout], [], [], seconds)[0]:
            read = os.read(self.process.stdout.fileno(), 2**16)
            assert read, "the process that forks has ended"
            self._lines = (self._lines[0] + read).split(b"\n")
        return len(self._lines) > 1


_server: _Server | None = None


class Warm:
    """A Python command that starts with all imports done. It has the interface of a `Popen`."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], out: Path, err: Path
    ) -> None:
        global _server
        if _server is None:
            _server = _Server()
        job = {"command": command[1:], "cwd": str(cwd), "env": dict(env)}
        self._server = _server
        self.pid = self._server.fork(job | {"out": str(out), "err": str(err)})
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        while self._server.hears(0):
            self._server.read()
        if self.returncode is None:
            self.returncode = self._server.ended.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code at its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self._server.hears(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _serve() -> dict[str, Any]:
    """Fork a child for each line of stdin; return in the child, with its job."""
    wakes, told = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(told)
    while True:
        ready, _, _ = select.select([sys.stdin, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 512)
            _report_ends()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)  # the tests are over
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return json.loads(line)
            print(json.dumps({"began": pid}), flush=True)


def _report_ends() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            print(json.dumps({"ended": ended[0], "code": code}), flush=True)


def _become(job: Mapping[str, Any]) -> None:
    """Give this process the session, environment, folder and files of the job's command."""
    os.setsid()
    os.environ.clear()
    os.environ.update(job["env"])
    # TorchOpt caches there what it has read from the environment.
    sys.modules["torchopt.distributed"].get_world_info.world_info = None
    # Its hooks of rank zero alone hold the rank that the process had when they were defined.
    for hook in vars(sys.modules["maml.run.log"].RunLog).values():
        names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, getattr(hook, "__closure__", None) or (), strict=True):
            if name == "world_rank":
                cell.cell_contents = int(os.environ.get("RANK", "0"))
    os.chdir(job["cwd"])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)
    ):  # fmt: skip
        os.dup2(os.open(path, flags), number)


def _main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    job = _serve()
    _become(job)
    first, *rest = job["command"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _main()
