"""A job that a scheduler suspends as a whole, for longer than --timeout, goes on when it wakes."""

from __future__ import annotations

import json
import random
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
IN_DEFAULT = ("rpc exclusive", "allreduce", "param-server sync")
OTHERS = [name for name in STRATEGIES if name not in IN_DEFAULT]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters of a run of one process that nobody has suspended."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_train([*RUN, "--strategy", "local", "--run-dir", str(run_dir)], timeout=120)
    model: dict[str, torch.Tensor] = last(run_dir)["model"]
    return model


@pytest.mark.parametrize(
    "strategy", [*IN_DEFAULT, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_a_suspended_job_goes_on(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], strategy: str
) -> None:
    """To the parameters of one process that nobody suspends."""
    run_dir = tmp_path / "run"
    ranks = start_ranks(3, [*RUN, *STRATEGIES[strategy], "--run-dir", str(run_dir)])
    try:
        wait_for_iteration(ranks[0], run_dir, 10, limit=90)
        suspend(random.Random(strategy).sample(ranks, len(ranks)), SUSPENDED_S)
    finally:
        done = [launched.wait(120, expect=None) for launched in ranks]
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    # Suspended on its way, not after it.
    assert metrics(run_dir)[-1]["seconds"] > SUSPENDED_S
    if "async" in strategy:
        return  # another order of gradients: other parameters, with or without a suspension
    for name, expected in undisturbed.items():
        assert torch.allclose(last(run_dir)["model"][name], expected, rtol=0, atol=1e-10), name
