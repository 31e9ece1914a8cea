"""A job that a scheduler suspends as a whole, for longer than --timeout, goes on when it wakes."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.launching import run_train, start_ranks
from tests.runs import last, metrics
from tests.strategies.faults import SINUSOID, STRATEGIES, suspend
from tests.strategies.waiting import wait_for_iteration

TIMEOUT_S, SUSPENDED_S = 10, 13
RUN = [*SINUSOID, "--iterations", "400", "--dtype", "float64", "--timeout", str(TIMEOUT_S)]
"""Long enough to be met on its way; the last value of a flag counts."""
IN_DEFAULT = ("rpc exclusive", "allreduce")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters of a run of one process that nobody has suspended."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_train([*RUN, "--strategy", "local", "--run-dir", str(run_dir)], timeout=120)
    model: dict[str, torch.Tensor] = last(run_dir)["model"]
    return model


@pytest.mark.parametrize(
    "strategies",
    [
        IN_DEFAULT,
        *(pytest.param([n], marks=pytest.mark.slow) for n in STRATEGIES if n not in IN_DEFAULT),
    ],
    ids=", ".join,
)
def test_suspended_jobs_go_on(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], strategies: Sequence[str]
) -> None:
    """To the parameters of one process that nobody suspends."""
    jobs = {
        name: start_ranks(3, [*RUN, *STRATEGIES[name], "--run-dir", str(tmp_path / name)])
        for name in strategies
    }
    ranks = [one for job in jobs.values() for one in job]
    try:
        for name, job in jobs.items():
            wait_for_iteration(job[0], tmp_path / name, 10, limit=90)
        suspend(random.Random(0).sample(ranks, len(ranks)), SUSPENDED_S)
    finally:
        done = [launched.wait(120, expect=None) for launched in ranks]
    assert not any(one.returncode for one in done), [one.stderr for one in done]
    for name in strategies:
        assert json.loads((tmp_path / name / "status.json").read_text())["state"] == "finished"
        # Suspended on its way, not after it.
        assert metrics(tmp_path / name)[-1]["seconds"] > SUSPENDED_S
        if "async" not in name:  # there another order of gradients gives other parameters
            model = last(tmp_path / name)["model"]
            for parameter, expected in undisturbed.items():
                torch.testing.assert_close(model[parameter], expected, rtol=0, atol=1e-10)
