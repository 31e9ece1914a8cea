"""Faults of a process, injected for real, and what comes of them; waiting for where a run is.

Every rank is started on its own, as a cluster's launcher does: the end of one is not the end of
all, and each has an exit code. But a launcher starts them where it is itself what dies, or what may
end the others.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from maml.run.directory import read_status
from tests.launching import SLACK, Launched, start, start_ranks, torchrun
from tests.runs import metrics

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "100000", "--log-every", "5", "--checkpoint-every", "5"),
]  # fmt: skip
PARAM_SERVER = ["--strategy", "param-server"]
STRATEGIES = {
    "rpc exclusive": ["--strategy", "rpc"],
    "rpc chunk": ["--strategy", "rpc", "--partition", "chunk"],
    "allreduce": ["--strategy", "allreduce"],
    "param-server sync": PARAM_SERVER,
    "param-server async": [*PARAM_SERVER, "--ps-mode", "async"],
    "param-server collective": [*PARAM_SERVER, "--ps-transport", "collective"],
    "param-server remote": [*PARAM_SERVER, "--ps-forward", "remote"],
}
ALL = STRATEGIES | {
    "param-server backup": [*PARAM_SERVER, "--ps-mode", "backup"],
    "observers": ["--strategy", "observers", "--horizon", "40", "--queries", "2"],
}
SHORT = ["--iterations", "10", "--test-tasks", "8", "--eval-every", "5", "--eval-tasks", "8"]
"""A run that comes to its end."""
WORLD = 3
DEATH_S = 10.0
"""Seconds after which a run has ended that has lost a process by its death."""


class Fault(NamedTuple):
    """What happens to a process."""

    by: signal.Signals | str  # what it is sent, or a function of `tests.strategies.faulty`
    cause: str  # what the line says by which the run ends, a regular expression
    ends: bool  # the process is gone, and so seen to be; else silence tells
    code: int = 1  # the exit code that it may have, beside 1 and that of a killed one
    phase: str = ""  # one of `PHASES` in which rank 0 is; "": in training, some time
    launcher: str = ""  # "torchrun" or "launch/local"; "": each is started on its own


LAUNCHER = -1
"""In place of a rank: the fault is the launcher's."""

FAULTS = {
    "killed": Fault(signal.SIGKILL, "was killed", ends=True),
    "crashed": Fault(signal.SIGSEGV, "was killed", ends=True, code=-signal.SIGSEGV),
    "failed": Fault("raises", r"failed: ValueError: C:\\users\\new and a second line", ends=True),
    "stopped": Fault(signal.SIGSTOP, "is stopped by a signal: silent for", ends=False),
    "holds the interpreter's lock": Fault("holds_lock", "hangs: silent for", ends=False),
    # gloo, finding its connections gone, ends its own process.
    "disconnected": Fault(
        "disconnects", "lost its connections|was killed", ends=True, code=-signal.SIGABRT
    ),
}
KILLED = FAULTS["killed"]
WHILE_DRAWING = KILLED._replace(phase="drawing", cause=r"\) was killed; all work is done$")
GOES_ON = KILLED._replace(launcher="launch/local", phase="training", cause="training goes on")
ALIVE = Fault("sleeps", r"had no answer .* alive: rank \d .* hangs, or needs more time", ends=False)
"""Who waits for whom depends on the strategy, and rank 0 may wait for nobody."""


class Outcome(NamedTuple):
    """How a run ended."""

    seconds: float  # from the fault to the end of the last process
    codes: list[int]  # of each rank
    said: list[str]  # the lines with "error: ", of all ranks
    stderr: str
    pid: int  # of the process that the fault was of
    state: str  # what status.json says


def inject(run_dir: Path, strategy: str, fault: Fault, rank: int, timeout: float) -> Outcome:
    """Train with ``strategy``, let ``fault`` happen to ``rank``; return how all ended."""
    marker = run_dir.with_name(f"{run_dir.name}-fault")
    env, script = {}, "train_maml.py"
    if isinstance(fault.by, str):
        env = {"FAULT": fault.by, "FAULT_RANK": str(rank), "FAULT_FILE": str(marker)}
    if fault.phase:
        env |= {"HOLD": fault.phase, "HOLD_FILE": str(marker)}
    if env:
        script = "tests/strategies/faulty.py"
    args = [*arguments(strategy), "--run-dir", str(run_dir), "--timeout", f"{timeout:g}"]
    if fault.phase:
        args += SHORT
    started = _start(fault.launcher, script, args, env)
    try:
        if fault.phase:
            _wait_until(marker.exists, f"{fault} has not come to its phase")
        else:
            wait_for_iteration(started[0], run_dir, 10, limit=90)
        pid = _process(started, fault, rank)
        if isinstance(fault.by, str):
            marker.touch()
            _wait_until(lambda: not marker.exists(), f"{fault} never happened")
        else:
            os.kill(pid, fault.by)
        began = time.monotonic()
        if fault.cause == GOES_ON.cause:
            # Rank 0 waits meanwhile: all work might be done before the loss is seen.
            started[0].wait_for("was killed", DEATH_S)
        marker.unlink(missing_ok=True)
        limit = began + (timeout + 60) * SLACK
        while any(one.processes() for one in started) and time.monotonic() < limit:
            time.sleep(0.1)
        seconds = time.monotonic() - began
    finally:
        done = [launched.wait(30, expect=None) for launched in started]
    stderr = "\n".join(one.stderr.replace("\r", "\n") for one in done)
    said = [line for line in stderr.splitlines() if re.search(SAID, line)]
    state = (read_status(run_dir) or {"state": "–"})["state"]
    return Outcome(seconds, [one.returncode for one in done], said, stderr, pid, state)


SAID = r"(?<!Fatal Python )error: |was killed"
"""What tells of a loss. torchrun's report of what it was told repeats such a line: not here."""


def arguments(strategy: str) -> list[str]:
    """Return the command line of an endless run with ``strategy``."""
    preset, *flags = SINUSOID
    if strategy == "observers":
        preset, flags = "reinforce-cartpole", [*flags, "--meta-batch-size", "4"]
    return [preset, *flags, *ALL[strategy]]


def _start(
    launcher: str, script: str, args: Sequence[str], env: Mapping[str, str]
) -> list[Launched]:
    """Start the ranks: each on its own, or all by a launcher."""
    if launcher == "torchrun":
        return [start([*torchrun(WORLD, [script]), *args], env=env)]
    if launcher:
        code = f"import sys\nfrom launch import workers\nworkers.TRAIN = {script!r}\n"
        code += "sys.exit(workers.main(sys.argv[1:]))"
        return [start([sys.executable, "-c", code, *args, "--workers", str(WORLD)], env=env)]
    return start_ranks(WORLD, args, script=script, env=env)


def _process(started: Sequence[Launched], fault: Fault, rank: int) -> int:
    """Return the process id of ``rank``, or of the launcher."""
    if not fault.launcher:
        return started[rank].process.pid
    return started[0].process.pid if rank == LAUNCHER else process_of_rank(started[0], rank)


def _wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60 * SLACK
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


PLANTED = """
import os, sys, time
from maml.processes.program import run_program
import train_maml
{code}
run_program(train_maml.main, sys.argv[1:])
"""


def planted(folder: Path, code: str) -> str:
    """Return a program that trains, once ``code`` has changed it: rank RANK goes wrong, say."""
    script = folder / "planted.py"
    script.write_text(PLANTED.format(code=code))
    return str(script)


def suspend(ranks: Sequence[Launched], seconds: float) -> None:
    """Stop all processes and let them go on, one after the other, as a scheduler does."""
    signal_each(ranks, signal.SIGSTOP)
    time.sleep(seconds)
    signal_each(ranks, signal.SIGCONT)


def signal_each(ranks: Sequence[Launched], number: signal.Signals) -> None:
    """Send a signal to one process after the other that has not ended."""
    for one in ranks:
        with suppress(ProcessLookupError):
            one.process.send_signal(number)
        time.sleep(0.2)


def wait_for_iteration(launched: Launched, run_dir: Path, iteration: int, limit: float) -> None:
    """Wait until a row of at least ``iteration`` is in metrics.jsonl, for ``limit`` × `SLACK` s."""
    deadline = time.monotonic() + SLACK * limit
    while not _has_row(run_dir, iteration):
        assert launched.process.poll() is None, f"ended early: {launched.stderr}"
        assert time.monotonic() < deadline, f"no row of iteration {iteration} in time"
        time.sleep(0.02)


def _has_row(run_dir: Path, iteration: int) -> bool:
    if not (run_dir / "metrics.jsonl").exists():
        return False
    return any(row["iteration"] >= iteration for row in metrics(run_dir))


def process_of_rank(launched: Launched, rank: int) -> int:
    """Return the process id of a rank under torchrun."""
    for process in psutil.Process(launched.process.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            return process.pid
    raise AssertionError(f"rank {rank} not found")
