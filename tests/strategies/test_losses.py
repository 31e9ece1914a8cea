"""What every strategy does when a process is frozen, killed or told to stop: injected for real.

Every rank is started on its own, as a cluster's launcher does: the end of one is not the end of
all, and each has an exit code.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launching import SLACK, Completed, start_ranks
from tests.strategies.waiting import wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "100000", "--log-every", "5", "--checkpoint-every", "5"),
]  # fmt: skip
PARAM_SERVER = ["--strategy", "param-server"]
STRATEGIES = {
    "rpc": ["--strategy", "rpc", "--partition", "chunk"],
    "allreduce": ["--strategy", "allreduce"],
    "server": PARAM_SERVER,
    "collective": [*PARAM_SERVER, "--ps-transport", "collective"],
}


SILENT_S = 20
"""When a frozen one is given up. A healthy one's first gradient takes seconds on a busy machine."""
SLOW_COLLECTIVE = pytest.param("collective", marks=pytest.mark.slow)


def lose(
    run_dir: Path, strategy: str, size: int, rank: int, number: signal.Signals
) -> list[Completed]:
    """Train with ``size`` processes, send ``rank`` a signal on the way; return how all ended."""
    args = [*SINUSOID, *STRATEGIES[strategy], "--run-dir", str(run_dir)]
    # One that is killed, or leaves, closes its connections, and nobody waits for the time to be up;
    # but for the server, which hears of a trainer's end by its silence alone.
    by_silence = number == signal.SIGSTOP or strategy == "server"
    args += ["--timeout", str(SILENT_S if by_silence else 600)]
    ranks = start_ranks(size, args)
    try:
        wait_for_iteration(ranks[0], run_dir, 10, limit=90)
        os.kill(ranks[rank].process.pid, number)
        for other, launched in enumerate(ranks):
            if other != rank or number == signal.SIGTERM:
                launched.process.wait(60 * SLACK)
    finally:
        if number == signal.SIGSTOP:
            os.kill(ranks[rank].process.pid, signal.SIGKILL)
        done = [launched.wait(30, expect=None) for launched in ranks]
    assert (run_dir / "checkpoints" / "last.pt").exists()
    return done


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("rpc", signal.SIGSTOP),
        ("allreduce", signal.SIGSTOP),
        ("server", signal.SIGSTOP),
        ("server", signal.SIGKILL),
        pytest.param("rpc", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("collective", signal.SIGSTOP, marks=pytest.mark.slow),
        # As collectives end everywhere: by a closed connection.
        pytest.param("allreduce", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("collective", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_ends_the_run(tmp_path: Path, strategy: str, number: signal.Signals) -> None:
    """One line on rank zero, a non-zero exit code on all, progress kept."""
    done = lose(tmp_path, strategy, 3, 2, number)
    assert [rank.returncode for rank in done] == [1, 1, -signal.SIGKILL]
    said = [line for rank in done[:2] for line in rank.stderr.splitlines() if "error: " in line]
    assert len(said) == 1, said
    assert said[0] in done[0].stderr
    if number == signal.SIGSTOP:
        assert f"--timeout {SILENT_S}" in said[0]
    if strategy in ("rpc", "server"):
        assert "rank(s) 2" in said[0]


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("rpc", signal.SIGSTOP),
        ("server", signal.SIGKILL),
        ("collective", signal.SIGSTOP),
        pytest.param("allreduce", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("collective", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_nobody_outlives_rank_zero(tmp_path: Path, strategy: str, number: signal.Signals) -> None:
    done = lose(tmp_path, strategy, 2, 0, number)
    assert [rank.returncode for rank in done] == [-signal.SIGKILL, 1]


@pytest.mark.parametrize("strategy", ["rpc", "server", SLOW_COLLECTIVE])
def test_a_signal_to_a_worker_stops_all(tmp_path: Path, strategy: str) -> None:
    """As when one host of a job is taken away: in good order, with a checkpoint.

    With allreduce all ranks drive: `test_allreduce.py`, which also goes on from there.
    """
    done = lose(tmp_path, strategy, 3, 2, signal.SIGTERM)
    assert "stopped by SIGTERM" in done[0].stdout
    assert [rank.returncode for rank in done] == [143, 0, 0]
