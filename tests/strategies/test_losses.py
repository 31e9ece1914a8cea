"""What every strategy does when a process is lost or told to stop: injected for real."""

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SLACK, start_ranks
from tests.runs import last, metrics, result
from tests.strategies.faults import (
    ALL,
    DEATH_S,
    FAULTS,
    GOES_ON,
    KILLED,
    LAUNCHER,
    SINUSOID,
    STRATEGIES,
    WHILE_DRAWING,
    Fault,
    Ranks,
    inject,
    wait_for_iteration,
)

SILENT_S = 15
"""The runs' --timeout. A healthy rank's first gradient takes seconds on a busy machine."""

# Each fault, each strategy, a worker and rank 0, and each phase of rank 0 are in a case.
QUICK = (
    ("rpc exclusive", "killed", 0, ""),
    ("rpc chunk", "stopped", 2, ""),
    ("allreduce", "holds the interpreter's lock", 0, ""),
    ("param-server sync", "failed", 2, ""),
    ("param-server collective", "disconnected", 2, ""),
    ("rpc chunk", "hangs while its heart beats", 2, ""),
    ("rpc exclusive", "exits", 2, ""),
    ("allreduce", "has no heartbeat", 2, ""),
    ("param-server sync", "cannot watch", 2, ""),
    ("param-server collective", "killed", (0, 1), ""),
    ("rpc chunk", "stopped", (0, 2), ""),
    ("allreduce", "killed", 0, "tested"),
)
HANGS = "hangs while its heart beats"
AT_ANY_TIME = (
    ("rpc exclusive", "failed", 2),
    ("rpc chunk", "crashed", 0),
    ("rpc chunk", "disconnected", 2),
    *(("allreduce", fault, 2) for fault in ("killed", HANGS, "exits")),
    *(("allreduce", fault, 0) for fault in ("failed", HANGS, "exits", "cannot watch")),
    ("allreduce", "has no heartbeat", 0),
    ("param-server async", "failed", 2),
    *(("param-server sync", f, 2) for f in ("holds the interpreter's lock", HANGS, "exits")),
    ("param-server sync", "stopped", 0),
    *(("param-server collective", fault, 2) for fault in ("stopped", HANGS, "exits")),
    ("param-server collective", "killed", 0),
    *(("param-server remote", fault, 2) for fault in ("killed", "stopped")),
    *((strategy, "killed", two) for strategy in ALL for two in ((0, 1), (0, 2), (1, 2))),
    *((strategy, "stopped", two) for strategy in STRATEGIES for two in ((0, 1), (1, 2))),
)
IN_PHASES = {
    "allreduce": ("validation", "test", "drawing", "parting"),
    "rpc chunk": ("test", "tested", "drawing"),
    "param-server collective": ("test", "tested"),
    "param-server backup": ("tested",),
    "rpc exclusive": ("parting",),
}
SLOW = [(*case, "") for case in AT_ANY_TIME]
SLOW += [(name, "killed", 0, phase) for name, of in IN_PHASES.items() for phase in of]


def _slow(*cases: tuple[object, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("strategy", "fault", "ranks", "phase"), [*QUICK, *_slow(*SLOW)])
def test_a_lost_process_ends_the_run(
    tmp_path: Path, strategy: str, fault: str, ranks: Ranks, phase: str
) -> None:
    """Exactly one line names rank, process and cause; the status is right, and progress is kept.

    The line names the rank that hangs, not a rank that waits for it. It names both of two ranks.
    """
    injected = FAULTS[fault]._replace(phase=phase)
    done = inject(tmp_path / "run", strategy, injected, ranks, SILENT_S)
    (line,) = done.said
    ranks = (ranks,) if isinstance(ranks, int) else ranks
    for rank, pid in zip(ranks, done.pids, strict=True):
        assert re.search(rf"rank {rank} \(host [^)]*, pid {pid}\)", line), line
    assert re.search(injected.cause, line)
    # Only the traceback of an error in the program may be shown.
    tracebacks = re.findall(r"Traceback .*\n(?: .*\n)*(.*)", done.stderr)
    assert all(re.match("ValueError: |SystemExit: ", told) for told in tracebacks), done.stderr
    # Torch's frames about a store that died with rank 0 may not be shown either.
    assert "TCPStore.cpp" not in done.stderr, done.stderr
    state = "finished" if phase in ("drawing", "parting") else "failed"
    assert done.state in (state, "lost" if 0 in ranks else state)
    assert all(code in (1, -signal.SIGKILL, injected.code) for code in done.codes), done.codes
    assert sum(code < 0 for code in done.codes) <= len(ranks), done.codes
    limit = DEATH_S if injected.ends else SILENT_S + DEATH_S
    assert done.seconds < limit * SLACK
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()


@pytest.mark.parametrize(
    ("strategy", "launcher", "phase"),
    [
        ("rpc exclusive", "torchrun", ""),
        ("param-server sync", "launch/local", ""),
        ("allreduce", "torchrun", "start"),
        *_slow(
            *((strategy, "torchrun", "") for strategy in ALL if strategy != "rpc exclusive"),
            *((strategy, "launch/local", "") for strategy in ("rpc chunk", "allreduce")),
            ("rpc chunk", "launch/local", "start"),
        ),
    ],
)
def test_a_killed_launcher_is_named(
    tmp_path: Path, strategy: str, launcher: str, phase: str
) -> None:
    """One line names it, and all ranks end: else they would train next to their successors."""
    fault = KILLED._replace(launcher=launcher, phase=phase)
    done = inject(tmp_path / "run", strategy, fault, LAUNCHER, SILENT_S)
    (line,) = done.said
    assert line.startswith(f"error: the launcher ({launcher}, host ")
    assert line.endswith(f"pid {done.pids[0]}) was killed")
    assert done.seconds < DEATH_S * SLACK
    if phase != "start":
        assert done.state == "failed"
        assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()


DRAWS_LOCALLY = WHILE_DRAWING._replace(launcher="launch/local")
DRAWS_ALONE = WHILE_DRAWING._replace(launcher="torchrun")


@pytest.mark.parametrize(
    ("strategy", "fault", "rank"),
    [
        ("rpc chunk", WHILE_DRAWING, 2),
        ("param-server backup", GOES_ON, 2),
        *_slow(
            *((strategy, WHILE_DRAWING, 2) for strategy in ALL if strategy != "rpc chunk"),
            *((s, DRAWS_ALONE, LAUNCHER) for s in ("rpc exclusive", "allreduce", "observers")),
            ("observers", GOES_ON, 2),
            ("allreduce", DRAWS_LOCALLY, 2),
        ),
    ],
)
def test_who_can_go_on_does(tmp_path: Path, strategy: str, fault: Fault, rank: int) -> None:
    """A worker or the launcher is killed, while rank 0 draws or another worker stands in for it.

    A line says so, and the run comes to its end; launch/local ends nobody.
    """
    done = inject(tmp_path / "run", strategy, fault, rank, SILENT_S)
    (line,) = done.said
    assert re.search(rf"pid {done.pids[0]}\) was killed; ", line)
    assert re.search(fault.cause, line) and "error: " not in line
    assert done.state == "finished"
    codes = {"": [0, 0, -signal.SIGKILL], "torchrun": [-signal.SIGKILL], "launch/local": [0]}
    assert done.codes == codes[fault.launcher]
    assert result(tmp_path / "run")["tasks"] == 8
    assert (tmp_path / "run" / "curves.png").exists()


def test_one_lost_at_the_start_ends_all_under_launch_local(tmp_path: Path) -> None:
    """Before the ranks have met, only the launcher sees the loss."""
    fault = KILLED._replace(launcher="launch/local", phase="start")
    done = inject(tmp_path / "run", "allreduce", fault, 1, SILENT_S)
    assert done.said == []
    assert done.codes == [128 + signal.SIGKILL]
    assert done.seconds < DEATH_S * SLACK


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("rpc chunk", signal.SIGHUP),
        ("allreduce", signal.SIGHUP),
        ("param-server sync", signal.SIGTERM),
        pytest.param("param-server collective", signal.SIGQUIT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_a_worker_stops_all(
    tmp_path: Path, strategy: str, number: signal.Signals
) -> None:
    """The run stops in good order, with a checkpoint, as when a job loses one host."""
    args = [*SINUSOID, *STRATEGIES[strategy], "--run-dir", str(tmp_path), "--timeout", "600"]
    ranks = start_ranks(3, args)
    try:
        wait_for_iteration(ranks[0], tmp_path, 10, limit=90)
        os.kill(ranks[2].process.pid, number)
    finally:
        done = [launched.wait(60, expect=None) for launched in ranks]
    assert f"stopped by {number.name}" in done[0].stdout
    of_workers = 128 + number if strategy == "allreduce" else 0  # all its ranks drive
    assert [rank.returncode for rank in done] == [128 + number, of_workers, of_workers]
    assert last(tmp_path)["iteration"] >= metrics(tmp_path)[-1]["iteration"]


def test_without_free_files_the_others_are_watched(tmp_path: Path) -> None:
    args = [*SINUSOID, *STRATEGIES["param-server collective"], "--timeout", str(SILENT_S)]
    ranks = start_ranks(3, [*args, "--run-dir", str(tmp_path)])
    try:
        wait_for_iteration(ranks[0], tmp_path, 10, limit=90)
        for one in ranks[1:]:
            resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, (8, 8))
        ranks[0].process.send_signal(signal.SIGSTOP)
    finally:
        done = [launched.wait(SILENT_S + DEATH_S, expect=None) for launched in ranks]
    assert [rank.returncode for rank in done] == [-signal.SIGKILL, 1, 1]
    said = "".join(one.stderr for one in done)
    (line,) = (line for line in said.splitlines() if "error: " in line)
    assert re.search(r"error: rank 0 \(.*\) is stopped by a signal: silent for \d+ s", line)
    assert "Traceback" not in said
