"""torchrun starts all processes again when one is lost: they go on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import run_train, start
from tests.runs import last, metrics, same
from tests.strategies.waiting import process_of_rank, wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--threads", "1", "--dtype", "float64", "--meta-batch-size", "4"),
    *("--log-every", "1", "--checkpoint-every", "5", "--iterations", "120"),
]  # fmt: skip
COLLECTIVE = ("param-server", "--ps-transport", "collective")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    [
        ("rpc", "--partition", "chunk"),
        ("allreduce",),
        pytest.param(("rpc",), marks=pytest.mark.slow),
        pytest.param(("param-server",), marks=pytest.mark.slow),
        pytest.param(COLLECTIVE, marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_restart_goes_on(strategy: tuple[str, ...], tmp_path: Path) -> None:
    """The launcher's store still holds what the first attempt had left there."""
    run_train([*SINUSOID, "--run-dir", str(tmp_path / "straight")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node=3", "--max-restarts=1", "train_maml.py", *SINUSOID]
    directory = tmp_path / "restarted"
    launched = start([*command, "--strategy", *strategy, "--run-dir", str(directory)])
    wait_for_iteration(launched, directory, 20, limit=120)
    os.kill(process_of_rank(launched, 1), signal.SIGKILL)
    done = launched.wait(150)
    begun = [line for line in done.stdout.splitlines() if "iterations" in line]
    assert len(begun) == 2 and "iterations 0 to" not in begun[1]
    assert [row["iteration"] for row in metrics(directory)] == list(range(1, 121))
    restarted, straight = last(directory)["model"], last(tmp_path / "straight")["model"]
    for name, tensor in straight.items():
        assert (restarted[name] - tensor).abs().max() < 1e-10
    assert same(list(restarted), list(straight))
