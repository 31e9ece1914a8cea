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
from tests.runs import last, metrics, same
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
        ("rpc", "--partition", "chunk"), ("allreduce",), ("rpc",), ("param-server",), COLLECTIVE,
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.slow
def test_a_restart_goes_on(strategy: tuple[str, ...], straight: Path, tmp_path: Path) -> None:
    """The launcher's store still holds what the first attempt had left there."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc_per_node=2", "--max-restarts=1", "train_maml.py", *SINUSOID]
    directory = tmp_path / "restarted"
    launched = start([*command, "--strategy", *strategy, "--run-dir", str(directory)])
    wait_for_iteration(launched, directory, 20, limit=120)
    os.kill(process_of_rank(launched, 1), signal.SIGKILL)
    done = launched.wait(150)
    _assert_went_on(done.stdout, directory, straight)


def test_a_restart_finds_its_run(straight: Path, tmp_path: Path) -> None:
    """Without --run-dir: it has the name of the launcher's start."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(REPO / "train_maml.py"), *SINUSOID, "--strategy", "allreduce"]
    command = [*launcher, "--nproc_per_node=2", "--max-restarts=1", *script]
    launched = start(command, cwd=tmp_path)
    deadline = time.monotonic() + SLACK * 120
    while not (found := list(tmp_path.glob("runs/*/metrics.jsonl"))):
        assert launched.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    directory = found[0].parent
    wait_for_iteration(launched, directory, 20, limit=120)
    os.kill(process_of_rank(launched, 1), signal.SIGKILL)
    done = launched.wait(150)
    _assert_went_on(done.stdout, directory, straight)
    assert list((tmp_path / "runs").iterdir()) == [directory]


def _assert_went_on(said: str, directory: Path, straight_dir: Path) -> None:
    begun = [line for line in said.splitlines() if "iterations" in line]
    assert len(begun) == 2 and "iterations 0 to" not in begun[1]
    assert [row["iteration"] for row in metrics(directory)] == list(range(1, 121))
    restarted, straight = last(directory)["model"], last(straight_dir)["model"]
    for name, tensor in straight.items():
        assert (restarted[name] - tensor).abs().max() < 1e-10
    assert same(list(restarted), list(straight))
