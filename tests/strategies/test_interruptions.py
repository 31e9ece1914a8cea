"""Runs that a launcher starts again, or a scheduler suspends: they go on to the same end."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from maml.config.cli import parse
from maml.trainer import Trainer
from tests.launching import REPO, start, start_ranks, torchrun
from tests.runs import last, metrics
from tests.strategies.faults import (
    IN_ORDER,
    SINUSOID,
    STRATEGIES,
    process_of_rank,
    signal_each,
    wait_for_iteration,
)

TIMEOUT_S, SUSPENDED_S = 10, 13
ITERATIONS = 400
"""Enough iterations to interrupt a run on its way."""
RUN = [
    *(*SINUSOID, "--iterations", str(ITERATIONS), "--dtype", "float64", "--threads", "1"),
    *("--log-every", "1"),
]
SLOW = pytest.mark.slow
Model = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The parameters of a run of one process that nothing has stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert Trainer(parse([*RUN, "--run-dir", str(folder)])).run() == 0
    return last(folder)["model"]


def assert_same(run_dir: Path, undisturbed: Model) -> None:
    torch.testing.assert_close(last(run_dir)["model"], undisturbed, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "strategy",
    [name if name == "allreduce" else pytest.param(name, marks=SLOW) for name in IN_ORDER],
)
def test_a_restart_goes_on(strategy: str, undisturbed: Model, tmp_path: Path) -> None:
    """The launcher's store still holds what the first attempt had left there.

    Without --run-dir, the restarted run finds its directory by the name of the launcher's start.
    The --resume of the command held for the first start only.
    """
    script = ["--max-restarts=1", str(REPO / "train_maml.py")]
    words = [*RUN, *STRATEGIES[strategy], "--resume", "never"]
    launched = start([*torchrun(2, script), *words], cwd=tmp_path)
    launched.wait_for("iterations 0 to", timeout=120)
    (directory,) = (tmp_path / "runs").iterdir()
    wait_for_iteration(launched, directory, 20, limit=120)
    os.kill(process_of_rank(launched, 1), signal.SIGKILL)
    done = launched.wait(150)
    begun = [line for line in done.stdout.splitlines() if "iterations" in line]
    assert len(begun) == 2 and "iterations 0 to" not in begun[1]
    assert [row["iteration"] for row in metrics(directory)] == list(range(1, ITERATIONS + 1))
    assert_same(directory, undisturbed)
    assert list((tmp_path / "runs").iterdir()) == [directory]


IN_DEFAULT = ("rpc exclusive", "allreduce")


@pytest.mark.parametrize(
    "strategies",
    [
        IN_DEFAULT,
        *(pytest.param([n], marks=SLOW) for n in STRATEGIES if n not in IN_DEFAULT),
    ],
    ids=", ".join,
)
def test_suspended_jobs_go_on(
    tmp_path: Path, undisturbed: Model, strategies: Sequence[str]
) -> None:
    """A scheduler suspends them as a whole, for longer than --timeout."""
    args, chance = [*RUN, "--timeout", str(TIMEOUT_S)], random.Random(0)
    jobs = {
        name: start_ranks(3, [*args, *STRATEGIES[name], "--run-dir", str(tmp_path / name)])
        for name in strategies
    }
    ranks = [one for job in jobs.values() for one in job]
    try:
        # Each when it is on its way, because the first may end before the last.
        for name, job in jobs.items():
            wait_for_iteration(job[0], tmp_path / name, 10, limit=90)
            signal_each(chance.sample(job, len(job)), signal.SIGSTOP)
        time.sleep(SUSPENDED_S)
        signal_each(chance.sample(ranks, len(ranks)), signal.SIGCONT)
    finally:
        done = [launched.wait(120, expect=None) for launched in ranks]
    assert not any(one.returncode for one in done), [one.stderr for one in done]
    for name in strategies:
        assert json.loads((tmp_path / name / "status.json").read_text())["state"] == "finished"
        # The run was suspended before its end.
        assert metrics(tmp_path / name)[-1]["seconds"] > SUSPENDED_S
        if "async" not in name:  # there another order of gradients gives other parameters
            assert_same(tmp_path / name, undisturbed)
