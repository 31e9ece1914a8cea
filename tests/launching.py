"""Start the program as a user does, in its own processes, and leave no process behind.

``run`` waits, within a hard time limit (see `SLACK`); ``start`` returns a
`Launched` at once, for tests that send signals. Every launched process inherits a variable by which
its descendants are found, in any session. After the time limit, py-spy dumps the Python stacks of
all of them, all are killed, and the test fails.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.warm import Warm

REPO = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "train_maml.py"]
PROGRAMS = {
    *("train_maml.py", "tests/strategies/faulty.py", "tests.strategies.topologies"),
    *("maml.evaluate", "maml.predict", "maml.replay", "maml.plots", "maml"),
}
"""Programs that start as a fork, with their imports done: see `tests.warm`."""
MARKER = "MAML_TEST_LAUNCH"
Completed = subprocess.CompletedProcess[str]

SLACK = 5.0
"""The factor on every time limit of a test.

A limit is the time that a slow machine needs. It exists to end a process that hangs. A healthy
process must end well within the limit, even if other programs keep every core busy.
"""
# Child processes may run for this long after the started process has ended.
_AFTERLIFE_S = 10.0


def torchrun(nproc: int, script: Sequence[str] = ("train_maml.py",)) -> list[str]:
    """Return the beginning of a torchrun command line with ``nproc`` processes on this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={nproc}", *script]


def start_ranks(
    world_size: int,
    args: Sequence[str],
    own: Mapping[int, Sequence[str]] | None = None,
    script: str = "train_maml.py",
    env: Mapping[str, str] | None = None,
) -> "list[Launched]":
    """Start every rank of ``script args`` without a launcher: one rank's end does not end all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [
        start(
            [sys.executable, script, *args, *(own or {}).get(rank, ())],
            env={
                **(env or {}),
                **{"RANK": str(rank), "WORLD_SIZE": str(world_size)},
                **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
        )
        for rank in range(world_size)
    ]


def run(
    command: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    expect: int | None = 0,
    cwd: Path = REPO,
) -> Completed:
    """Run ``command`` to its end, at most ``timeout`` × `SLACK` s; return it, with output as text.

    ``env`` has variables to add. ``expect`` is the exit code; None allows any.
    """
    return start(command, env=env, cwd=cwd).wait(timeout, expect=expect)


def run_together(commands: Sequence[Sequence[str]], timeout: float) -> list[Completed]:
    """Run ``commands`` at the same time to their ends; after a failure, kill all."""
    started = [start(command) for command in commands]
    try:
        return [one.wait(timeout) for one in started]
    finally:
        for one in started:
            one.kill()


def start(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path = REPO
) -> "Launched":
    """Start ``command`` in its own session and return at once; see `_starts_warm`."""
    return Launched(command, env or {}, cwd)


def _starts_warm(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> bool:
    """Return whether the command may start with its imports done, as the repository's programs do.

    A command starts as a user's does if torchrun starts it, if it patches the program first, or if
    an import reads its variables.
    """
    first, *rest = command
    at_import = any(name.startswith(("PYTHON", "CXX")) for name in env)
    if first != sys.executable or cwd != REPO or at_import:
        return False
    return rest[0] in PROGRAMS or (rest[0] == "-m" and rest[1] in PROGRAMS)


def until(
    holds: Callable[[], object], timeout: float = 20, otherwise: Callable[[], str] = str
) -> None:
    """Wait until ``holds()`` is true, at most ``timeout`` × `SLACK` s; else say ``otherwise()``."""
    deadline = time.monotonic() + SLACK * timeout
    while not holds():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


class Launched:
    """A started command. Always call `wait`: it also kills processes that are left."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.command = list(command)
        self._mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPO),
            MARKER: self._mark,
            # Without this, a process title overwrites the memory that the marker is read from.
            "SPT_NOENV": "1",
            **env,
        }
        # Files, not pipes: they need no reader, and a test can read them while the command runs.
        self._folder = Path(tempfile.mkdtemp(prefix="launched-"))
        with open(self._folder / "out", "wb") as out, open(self._folder / "err", "wb") as err:
            if _starts_warm(command, env, cwd):
                self.process: Warm | subprocess.Popen[bytes] = Warm(
                    self.command, cwd, environment, self._folder / "out", self._folder / "err"
                )
            else:
                self.process = subprocess.Popen(
                    self.command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip

    @property
    def stdout(self) -> str:
        """Return what the command has printed so far."""
        return (self._folder / "out").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """Return what the command has printed to stderr so far."""
        return (self._folder / "err").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return every live process that descends from the command."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # psutil cannot see variables that a fork has set for itself.
                first = process.pid == self.process.pid and self.process.poll() is None
                if first or process.environ().get(MARKER) == self._mark:
                    found.append(process)
        return found

    def wait_for(self, text: str, timeout: float) -> None:
        """Wait until ``text`` is printed. If that is not in time, kill everything and fail."""
        deadline = time.monotonic() + SLACK * timeout
        while text not in self.stdout and text not in self.stderr:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._fail(f"{text!r} was never printed")
            time.sleep(0.05)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the command's process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def wait(self, timeout: float, *, expect: int | None = 0) -> Completed:
        """Wait for the end; assert the exit code and that no process is left behind."""
        try:
            code = self.process.wait(SLACK * timeout)
        except subprocess.TimeoutExpired:
            self._fail(f"not done within {SLACK * timeout:g} s; stacks:\n{self._stacks()}")
        left = self._left_behind()
        if left:
            names = [" ".join(process.cmdline()) for process in left if process.is_running()]
            self._fail(f"left processes behind: {names}; stacks:\n{self._stacks()}")
        if expect is not None and code != expect:
            self._fail(f"exit code {code}, not {expect}")
        completed = subprocess.CompletedProcess(self.command, code, self.stdout, self.stderr)
        shutil.rmtree(self._folder)
        return completed

    def kill(self) -> None:
        """Kill every process of the command."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()

    def _left_behind(self) -> list[psutil.Process]:
        deadline = time.monotonic() + SLACK * _AFTERLIFE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _fail(self, reason: str) -> None:
        self.kill()
        said = f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        shutil.rmtree(self._folder)
        raise AssertionError(f"{' '.join(self.command)}: {reason}\n{said}")

    def _stacks(self) -> str:
        spy = Path(sys.executable).with_name("py-spy")
        if not spy.exists():
            return "(py-spy is not installed)"
        dumps = []
        for process in self.processes():
            try:
                dump = subprocess.run(
                    [str(spy), "dump", "--pid", str(process.pid)],
                    capture_output=True,
                    text=True,
                    timeout=20,
                )
                dumps.append(f"{process.pid}: {dump.stdout or dump.stderr}")
            except (OSError, subprocess.TimeoutExpired) as error:
                dumps.append(f"{process.pid}: {error}")
        return "\n".join(dumps)
