"""torchrun starts all processes again when one is lost: they go on from the last checkpoint."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from maml.config.cli import parse
from maml.trainer import Trainer
from tests.launching import REPO, SLACK, start
from tests.runs import last, metrics
from tests.strategies.waiting import process_of_rank, wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--threads", "1", "--dtype", "float64", "--meta-batch-size", "4"),
    *("--log-every", "1", "--checkpoint-every", "5", "--iterations", "120"),
]  # fmt: skip
COLLECTIVE = ("param-server", "--ps-transport", "collective")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("straight")
    assert Trainer(parse([*SINUSOID, "--run-dir", str(folder)])).run() == 0
    return folder


@pytest.mark.parametrize(
    "strategy",
    [
        ("allreduce",),
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (("rpc", "--partition", "chunk"), ("rpc",), ("param-server",), COLLECTIVE)
        ),
    ],
    ids=" ".join,
)
def test_a_restart_goes_on(strategy: tuple[str, ...], straight: Path, tmp_path: Path) -> None:
    """The launcher's store still holds what the first attempt had left there.

    Without --run-dir: the run has the name of the launcher's start, by which it is found.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(REPO / "train_maml.py"), *SINUSOID, "--strategy", *strategy]
    launched = start([*launcher, "--nproc_per_node=2", "--max-restarts=1", *script], cwd=tmp_path)
    deadline = time.monotonic() + SLACK * 120
    while not (found := list(tmp_path.glob("runs/*/metrics.jsonl"))):
        assert launched.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    directory = found[0].parent
    wait_for_iteration(launched, directory, 20, limit=120)
    os.kill(process_of_rank(launched, 1), signal.SIGKILL)
    done = launched.wait(150)
    begun = [line for line in done.stdout.splitlines() if "iterations" in line]
    assert len(begun) == 2 and "iterations 0 to" not in begun[1]
    assert [row["iteration"] for row in metrics(directory)] == list(range(1, 121))
    restarted, expected = last(directory)["model"], last(straight)["model"]
    assert list(restarted) == list(expected)
    for name, tensor in expected.items():
        assert (restarted[name] - tensor).abs().max() < 1e-10
    assert list((tmp_path / "runs").iterdir()) == [directory]
