"""The rpc strategy: facts of RPC that break naive code, and failures injected for real."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import run, run_torchrun, start, start_ranks, torchrun
from tests.strategies.waiting import process_of_rank, wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off"),
]  # fmt: skip


@pytest.mark.parametrize(
    "check",
    [
        "parameter_is_detached",
        "missing_gradient_is_refused",
        "clone_aliases_parameters",
        "concurrent_calls_do_not_mix",
        "calls_in_flight_stay_below_threads",
    ],
)
def test_fact(check: str) -> None:
    done = run([sys.executable, "-m", "tests.strategies.rpc_checks", check], timeout=120)
    assert f"{check}: holds" in done.stdout


@pytest.mark.parametrize("partition", ["exclusive", "chunk"])
def test_many_tasks_on_few_threads_finish(tmp_path: Path, partition: str) -> None:
    """256 tasks on 2 workers with 2 threads each: nothing waits for a thread in a thread."""
    args = [*SINUSOID, "--meta-batch-size", "256", "--iterations", "2", "--rpc-threads", "2"]
    args += ["--partition", partition, "--run-dir", str(tmp_path)]
    run_torchrun(2, args, timeout=180)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 2


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_lost_worker_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """A frozen or killed peer: one line, a non-zero exit code, nobody left, progress kept."""
    args = [*SINUSOID, "--iterations", "100000", "--log-every", "1", "--checkpoint-every", "1"]
    args += ["--timeout", "15", "--run-dir", str(tmp_path)]
    launched = start([*torchrun(2), *args])
    try:
        wait_for_iteration(launched, tmp_path, 1, limit=90)
        os.kill(process_of_rank(launched, 1), number)
    finally:
        # torchrun gives a process that does not end 30 s before it kills it.
        done = launched.wait(120, expect=None)
    assert done.returncode != 0
    if number == signal.SIGSTOP:
        assert "--timeout 15" in done.stderr
    assert (tmp_path / "checkpoints" / "last.pt").exists()


@pytest.mark.parametrize("strategy", ["rpc", "param-server"])
def test_a_signal_to_a_worker_stops_all(tmp_path: Path, strategy: str) -> None:
    """As when one host of a job is taken away: in good order, with a checkpoint."""
    args = [*SINUSOID, "--iterations", "100000", "--log-every", "1", "--strategy", strategy]
    ranks = start_ranks(2, [*args, "--run-dir", str(tmp_path)])
    try:
        wait_for_iteration(ranks[0], tmp_path, 5, limit=90)
        os.kill(ranks[1].process.pid, signal.SIGTERM)
    finally:
        done = [launched.wait(60, expect=None) for launched in ranks]
    assert [rank.returncode for rank in done] == [143, 0]
    assert "stopped by SIGTERM" in done[0].stdout
    assert (tmp_path / "checkpoints" / "last.pt").exists()


def test_failing_task_names_its_rank(tmp_path: Path) -> None:
    """An exception on a worker reaches the user with its rank, and the run ends."""
    code = (
        "import sys, os, maml.worker as w\n"
        "from maml.program import run_program\n"
        "import train_maml\n"
        "if os.environ['RANK'] == '1':\n"
        "    def broken(*args): raise ValueError('planted')\n"
        "    w.Worker.meta_gradient = broken\n"
        "run_program(train_maml.main, sys.argv[1:])\n"
    )
    script = tmp_path / "broken.py"
    script.write_text(code)
    args = [*SINUSOID, "--iterations", "3", "--run-dir", str(tmp_path / "run")]
    done = run([*torchrun(2, [str(script)]), *args], timeout=120, expect=None)
    assert done.returncode != 0
    assert "error: rank 1 failed: ValueError('planted')" in done.stderr
