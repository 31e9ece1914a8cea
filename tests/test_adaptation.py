"""What the benchmark of adaptation says of returns: intervals, and what is chosen."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks import adaptation


def test_an_interval_is_as_wide_as_seeds_differ() -> None:
    """Seeds that are good or bad at all tasks alike: what is known is the mean of ten numbers."""
    generator = np.random.default_rng(1)
    of_seeds = generator.normal(100, 10, size=(10, 1))
    scores = of_seeds + generator.normal(0, 1, size=(10, 40))
    mean, low, high = adaptation.interval(scores)
    assert mean == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))
    # The bootstrap of the ten means alone, by scipy.
    own = stats.bootstrap(
        (scores.mean(1),), lambda x, axis: stats.trim_mean(x, 0.25, axis=axis), n_resamples=2000,
        method="percentile", rng=generator,
    ).confidence_interval  # fmt: skip
    assert (low, high) == pytest.approx((own.low, own.high), abs=1.5)
    # Seeds drawn within each task look as if there were four hundred of them.
    _, low_within, high_within = adaptation.stratified(scores)
    assert high_within - low_within < (high - low) / 2


def test_the_best_on_average_is_chosen() -> None:
    """Of each policy's own trials, over seeds and tasks: not the best single trial."""
    every = {f"{steps} × {rate:g}": [0.0, 0.0] for steps in (1, 2, 5) for rate in adaptation.RATES}
    lucky = {"policy": "maml", "setting": 0, "seed": 0, **every, "1 × 3": [200.0, 100.0]}
    unlucky = {"policy": "maml", "setting": 0, "seed": 1, **every, "1 × 3": [20.0, 20.0]}
    steady = [
        {"policy": "maml", "setting": 1, "seed": seed, **every, "2 × 10": [90.0, 95.0]}
        for seed in (0, 1)
    ]
    other = {"policy": "all", "setting": 0, "seed": 0, **every, "5 × 30": [500.0, 500.0]}
    found = adaptation.choose([lucky, unlucky, *steady, other], "maml")
    assert (found["setting"], found["steps"], found["rate"]) == (1, 2, 10.0)
    assert found["validation"] == 92.5
    assert found["trained_with"] == adaptation.SETTINGS["maml"][1]
