"""The same command gives the same float32 bits: when run twice, and when killed and resumed."""

import json
import random
from pathlib import Path

import pytest

from tests.launching import run, start, torchrun
from tests.runs import last, same
from tests.strategies.faults import IN_ORDER, wait_for_iteration
from tests.strategies.test_equivalence import TOPOLOGIES

# Six tasks for each of two workers: in float32, the order of a sum changes its bits.
GLYPHS = [
    *("maml-glyphs-5way-1shot", "--filters", "8", "--meta-batch-size", "12", "--threads", "1"),
    *("--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--log-every", "1", "--checkpoint-every", "5"),
]  # fmt: skip
TWICE = 8
"""Iterations of the runs to be compared."""
IN_DEFAULT = "rpc exclusive"
"""The strategy that is killed in the default suite."""


def train(folder: Path, runs: dict[str, tuple[str, int]]) -> None:
    """Train with two workers into folders of these names, each by strategy and iterations."""
    args = {
        name: [*GLYPHS, "--iterations", str(iterations), *IN_ORDER[strategy]]
        for name, (strategy, iterations) in runs.items()
    }
    run([*torchrun(2, TOPOLOGIES), str(folder), json.dumps(args)], timeout=240)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train twice with each strategy, without a stop; return the folder of the runs."""
    folder = tmp_path_factory.mktemp("straight")
    train(folder, {f"{name} {i}": (name, TWICE) for name in IN_ORDER for i in (1, 2)})
    return folder


@pytest.mark.parametrize("strategy", IN_ORDER)
def test_twice(straight: Path, strategy: str) -> None:
    one, two = (last(straight / f"{strategy} {i}") for i in (1, 2))
    assert one["iteration"] == TWICE
    assert same(one["model"], two["model"])
    assert same(one["optimizer"], two["optimizer"])


@pytest.mark.parametrize(
    ("strategy", "iterations", "kills"),
    [
        (IN_DEFAULT, 40, 1),
        *(pytest.param(strategy, 400, 20, marks=pytest.mark.slow) for strategy in IN_ORDER),
    ],
)
def test_killed_at_random_moments(
    tmp_path: Path, strategy: str, iterations: int, kills: int
) -> None:
    """Kill all processes of a run at random iterations; some of the kills hit a save."""
    train(tmp_path, {"straight": (strategy, iterations)})
    args = [*GLYPHS, "--iterations", str(iterations), *IN_ORDER[strategy]]
    run_dir = tmp_path / "killed"
    command = [*torchrun(2), *args, "--run-dir", str(run_dir)]
    for moment in sorted(random.Random(0).sample(range(5, iterations - 20), kills)):
        launched = start(command)
        wait_for_iteration(launched, run_dir, moment, limit=120)
        launched.kill()
        launched.wait(10, expect=None)
        # Otherwise nothing would be resumed.
        assert last(run_dir)["iteration"] < iterations
    run(command, timeout=240)
    assert last(run_dir)["iteration"] == iterations
    assert same(last(run_dir)["model"], last(tmp_path / "straight")["model"])
