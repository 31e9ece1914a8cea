"""What every strategy does when a process is lost or told to stop: injected for real."""

import os
import re
import signal
from collections.abc import Sequence
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
    wait_for_iteration,
)
from tests.strategies.record_of_faults import RECORD, every, inject

pytestmark = pytest.mark.fault

Cases = Sequence[tuple[object, ...]]
SILENT_S = 15
"""The runs' --timeout. A healthy rank's first gradient takes seconds on a busy machine."""

# Each fault, each strategy, a worker and rank 0 are in a case of QUICK or SLOW.
QUICK = (
    ("rpc exclusive", "killed", 0),
    ("rpc chunk", "stopped", 2),
    ("allreduce", "holds the interpreter's lock", 0),
    ("param-server sync", "failed", 2),
    ("param-server collective", "disconnected", 2),
    ("rpc chunk", "hangs while its heart beats", 2),
    ("rpc exclusive", "exits", 2),
    ("allreduce", "has no heartbeat", 2),
    ("param-server sync", "cannot watch", 2),
    ("param-server collective", "killed", (0, 1)),
    ("rpc chunk", "stopped", (0, 2)),
    ("param-server collective", "stopped, and no other may open a file", 0),
)
SLOW = (
    ("rpc exclusive", "failed", 2),
    ("rpc chunk", "crashed", 0),
    ("rpc chunk", "disconnected", 2),
    ("allreduce", "killed", 2),
    ("allreduce", "failed", 0),
    ("param-server async", "failed", 2),
    ("param-server sync", "holds the interpreter's lock", 2),
    ("param-server sync", "stopped", 0),
    ("param-server collective", "stopped", 2),
    ("param-server collective", "killed", 0),
    ("param-server remote", "killed", 2),
    ("param-server remote", "stopped", 2),
    ("allreduce", "hangs while its heart beats", 0),
    ("allreduce", "hangs while its heart beats", 2),
    ("param-server collective", "hangs while its heart beats", 2),
    ("param-server sync", "hangs while its heart beats", 2),
    *(("allreduce", fault, 0) for fault in ("exits", "cannot watch", "has no heartbeat")),
    *((s, "exits", 2) for s in ("allreduce", "param-server sync", "param-server collective")),
    *((strategy, "killed", two) for strategy in ALL for two in ((0, 1), (0, 2), (1, 2))),
    *((strategy, "stopped", two) for strategy in STRATEGIES for two in ((0, 1), (1, 2))),
    *((s, "killed, under torchrun", (0, 1)) for s in ("rpc exclusive", "allreduce")),
)


def _cases(quick: Cases, slow: Cases, of_record: Cases = ()) -> list[Any]:
    """Return a test's cases. Those of a record alone are there if one is written."""
    more = [case for case in of_record if RECORD and case not in (*quick, *slow)]
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in (*slow, *more))]


@pytest.mark.parametrize(("strategy", "fault", "ranks"), _cases(QUICK, SLOW, every()))
def test_a_lost_process_ends_the_run(
    tmp_path: Path, strategy: str, fault: str, ranks: Ranks
) -> None:
    """Exactly one line names rank, process and cause; the status is right, and progress is kept.

    The line names the rank that hangs, not a rank that waits for it. It names both of two ranks.
    """
    _check_end(tmp_path / "run", strategy, FAULTS[fault], ranks)


@pytest.mark.parametrize(
    ("strategy", "phase"),
    _cases(
        [("allreduce", "tested")],
        [
            *(("allreduce", phase) for phase in ("validation", "test", "drawing")),
            *(("rpc chunk", phase) for phase in ("test", "tested", "drawing")),
            *(("param-server collective", phase) for phase in ("test", "tested")),
            ("param-server backup", "tested"),
            *((strategy, "parting") for strategy in ("rpc exclusive", "allreduce")),
        ],
        [(strategy, "tested") for strategy in ALL],
    ),
)
def test_rank_zero_is_named_in_every_phase(tmp_path: Path, strategy: str, phase: str) -> None:
    state = "finished" if phase in ("drawing", "parting") else "failed"
    _check_end(tmp_path / "run", strategy, KILLED._replace(phase=phase), 0, state)


@pytest.mark.parametrize(
    ("strategy", "launcher", "phase"),
    _cases(
        [
            ("rpc exclusive", "torchrun", ""),
            ("param-server sync", "launch/local", ""),
            ("allreduce", "torchrun", "start"),
        ],
        [
            *((strategy, "torchrun", "") for strategy in ALL if strategy != "rpc exclusive"),
            *((strategy, "launch/local", "") for strategy in ("rpc chunk", "allreduce")),
            ("rpc chunk", "launch/local", "start"),
        ],
        [
            *((strategy, "launch/local", "") for strategy in ALL),
            ("rpc exclusive", "torchrun", "start"),
        ],
    ),
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


@pytest.mark.parametrize(
    ("strategy", "rank"),
    _cases(
        [("rpc chunk", 2)],
        [
            *((strategy, 2) for strategy in ALL if strategy != "rpc chunk"),
            *((strategy, LAUNCHER) for strategy in ("rpc exclusive", "allreduce", "observers")),
        ],
    ),
)
def test_what_is_finished_stays_so(tmp_path: Path, strategy: str, rank: int) -> None:
    """A worker or the launcher is killed while rank 0 draws: a line says so, and it draws on."""
    launcher = "torchrun" if rank == LAUNCHER else ""
    fault = WHILE_DRAWING._replace(launcher=launcher)
    done = inject(tmp_path / "run", strategy, fault, rank, SILENT_S)
    (line,) = done.said
    assert f"pid {done.pids[0]}) was killed; all work is done" in line
    assert "error: " not in line
    assert done.state == "finished"
    assert done.codes == ([-signal.SIGKILL] if launcher else [0, 0, -signal.SIGKILL])
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.parametrize(
    ("strategy", "fault"),
    _cases(
        [("param-server backup", GOES_ON)],
        # While rank 0 draws, all work is done: every strategy can lose a worker.
        [("observers", GOES_ON), ("allreduce", WHILE_DRAWING._replace(launcher="launch/local"))],
    ),
)
def test_a_launcher_ends_nobody_who_can_go_on(tmp_path: Path, strategy: str, fault: Fault) -> None:
    """Under launch/local one rank is killed: the run comes to its end and does not fail."""
    done = inject(tmp_path / "run", strategy, fault, 2, SILENT_S)
    (line,) = done.said
    assert re.search(rf"^rank 2 \(host .*, pid {done.pids[0]}\) was killed; ", line)
    assert re.search(fault.cause, line)
    assert done.codes == [0]
    assert done.state == "finished"
    assert result(tmp_path / "run")["tasks"] == 8


def test_one_lost_at_the_start_ends_all_under_launch_local(tmp_path: Path) -> None:
    """Before the ranks have met, only the launcher sees the loss."""
    fault = KILLED._replace(launcher="launch/local", phase="start")
    done = inject(tmp_path / "run", "allreduce", fault, 1, SILENT_S)
    assert done.said == []
    assert done.codes == [128 + signal.SIGKILL]
    assert done.seconds < DEATH_S * SLACK


def _check_end(
    run_dir: Path, strategy: str, fault: Fault, ranks: Ranks, state: str = "failed"
) -> None:
    done = inject(run_dir, strategy, fault, ranks, SILENT_S)
    (line,) = done.said
    ranks = (ranks,) if isinstance(ranks, int) else ranks
    for rank, pid in zip(ranks, done.pids, strict=True):
        assert re.search(rf"rank {rank} \(host [^)]*, pid {pid}\)", line), line
    assert re.search(fault.cause, line)
    # Only the traceback of an error in the program may be shown, and torchrun's.
    tracebacks = re.findall(r"Traceback .*\n(?: .*\n)*(.*)", done.stderr)
    assert all(re.match("ValueError: |SystemExit: |torch.distr", told) for told in tracebacks), (
        done.stderr
    )
    # Torch's frames about a store that died with rank 0 may not be shown either.
    assert "TCPStore.cpp" not in done.stderr, done.stderr
    assert done.state in (state, "lost" if 0 in ranks else state)
    assert all(code in (1, -signal.SIGKILL, fault.code) for code in done.codes), done.codes
    assert sum(code < 0 for code in done.codes) <= len(ranks), done.codes
    limit = DEATH_S if fault.ends else SILENT_S + DEATH_S
    assert done.seconds < limit * SLACK
    assert (run_dir / "checkpoints" / "last.pt").exists()


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
