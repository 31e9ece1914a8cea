"""Inject real faults into a process of a run and return how the run ends; wait for an iteration.

Each rank is started on its own, as by a cluster's launcher: one rank may end while the others run,
and each rank has its own exit code. A launcher starts the ranks only in those tests in which the
launcher dies or may end the other ranks.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from maml.processes.board import BEAT
from maml.run.directory import read_status
from tests.launching import SLACK, Launched, start, start_ranks, torchrun, until
from tests.runs import metrics

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "100000", "--log-every", "5", "--checkpoint-every", "5"),
]  # fmt: skip
PARAM_SERVER = ["--strategy", "param-server"]
IN_ORDER = {
    "rpc exclusive": ["--strategy", "rpc"],
    "rpc chunk": ["--strategy", "rpc", "--partition", "chunk"],
    "allreduce": ["--strategy", "allreduce", "--check-every", "1"],
    "param-server sync": PARAM_SERVER,
    "param-server collective": [*PARAM_SERVER, "--ps-transport", "collective"],
}
"""The strategies whose sums have one order, so that a command always gives the same bits."""
STRATEGIES = IN_ORDER | {
    "param-server async": [*PARAM_SERVER, "--ps-mode", "async"],
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
"""A run ends within this many seconds after one of its processes has died."""


class Fault(NamedTuple):
    """What happens to a process."""

    by: signal.Signals | str  # the signal to send, or a function of `tests.strategies.faulty`
    cause: str  # a regular expression for the line that reports the fault
    ends: bool  # the process is gone at once; else the others notice its silence
    code: int = 1  # an exit code that is allowed in addition to 1 and -SIGKILL
    phase: str = ""  # one of `PHASES`, in which rank 0 waits; "": any time in training
    launcher: str = ""  # "torchrun" or "launch/local"; "": each rank is started on its own
    no_files: bool = False  # no other process may open a file from then on


LAUNCHER = -1
"""Stands for a rank: the fault happens to the launcher."""
Ranks = int | tuple[int, ...]

RAISED = r"failed: ValueError: C:\\users\\new and a second line"
FAULTS = {
    "killed": Fault(signal.SIGKILL, "was killed", ends=True),
    "crashed": Fault(signal.SIGSEGV, "was killed", ends=True, code=-signal.SIGSEGV),
    "failed": Fault("raises", RAISED, ends=True),
    "exits": Fault("exits", r"failed: SystemExit: 0", ends=True),
    "cannot watch": Fault("cannot_watch", RAISED, ends=True),
    "has no heartbeat": Fault("has_no_heartbeat", RAISED, ends=True),
    "stopped": Fault(signal.SIGSTOP, "is stopped by a signal: silent for", ends=False),
    "holds the interpreter's lock": Fault("holds_lock", "hangs: silent for", ends=False),
    # gloo ends its own process when it has lost its connections.
    "disconnected": Fault(
        "disconnects", "lost its connections|was killed", ends=True, code=-signal.SIGABRT
    ),
    # The waiting rank depends on the strategy, and rank 0 may wait for no other rank.
    "hangs while its heart beats": Fault(
        "sleeps", r"had no answer .* alive: rank \d .* hangs, or needs more time", ends=False
    ),
}
KILLED = FAULTS["killed"]
FAULTS |= {
    "stopped, and no other may open a file": FAULTS["stopped"]._replace(no_files=True),
    "killed, under torchrun": KILLED._replace(launcher="torchrun"),
}
WHILE_DRAWING = KILLED._replace(phase="drawing", cause=r"\) was killed; all work is done$")
GOES_ON = KILLED._replace(launcher="launch/local", phase="training", cause="training goes on")


class Outcome(NamedTuple):
    """How a run ended."""

    seconds: float  # from the fault to the end of the last process
    codes: list[int]  # of each rank
    said: list[str]  # the lines with "error: ", of all ranks
    stderr: str
    pids: list[int]  # of the processes that had the fault
    state: str  # what status.json says


def inject(run_dir: Path, strategy: str, fault: Fault, ranks: Ranks, timeout: float) -> Outcome:
    """Train with ``strategy``, let ``fault`` happen to ``ranks``; return how the run ended.

    Several ranks are hit at once, by a signal.
    """
    ranks = (ranks,) if isinstance(ranks, int) else ranks
    marker = run_dir.with_name(f"{run_dir.name}-fault")
    args = [*arguments(strategy), "--run-dir", str(run_dir), "--timeout", f"{timeout:g}"]
    env = {}
    if isinstance(fault.by, str):
        env = {"FAULT": fault.by, "FAULT_RANK": str(ranks[0]), "FAULT_FILE": str(marker)}
    if fault.phase:
        env |= {"HOLD": fault.phase, "HOLD_FILE": str(marker)}
        args += SHORT
    script = "tests/strategies/faulty.py" if env else "train_maml.py"
    started = _start(fault.launcher, script, args, env)
    try:
        if fault.phase:
            until(marker.exists, 60, lambda: f"{fault} has not come to its phase")
            time.sleep(2 * BEAT)  # until the others have read of a phase in which all is done
        else:
            wait_for_iteration(started[0], run_dir, 10, limit=90)
        pids = [_process(started, fault, rank) for rank in ranks]
        for one in started:
            if fault.no_files and one.process.pid not in pids:
                resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, (8, 8))
        if isinstance(fault.by, str):
            marker.touch()
            until(lambda: not marker.exists(), 60, lambda: f"{fault} never happened")
        else:
            for pid in pids:
                os.kill(pid, fault.by)
        began = time.monotonic()
        if fault.cause == GOES_ON.cause:
            # Rank 0 is held until then, because it might finish all work before it sees the loss.
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
    return Outcome(seconds, [one.returncode for one in done], said, stderr, pids, state)


SAID = r"^(?! *traceback : ).*((?<!Fatal Python )error: |was killed)"
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


PLANTED = """
import os, sys, time
from maml.processes.program import run_program
import train_maml
{code}
run_program(train_maml.main, sys.argv[1:])
"""


def planted(folder: Path, code: str) -> str:
    """Write a program that runs ``code``, to break a rank, and then trains; return its path."""
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

    def reached() -> bool:
        found = any(row["iteration"] >= iteration for row in metrics(run_dir))
        assert found or launched.process.poll() is None, f"ended early: {launched.stderr}"
        return found

    until(reached, limit, lambda: f"no row of iteration {iteration} in time")


def process_of_rank(launched: Launched, rank: int) -> int:
    """Return the process id of a rank under torchrun."""
    for process in psutil.Process(launched.process.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            return process.pid
    raise AssertionError(f"rank {rank} not found")
