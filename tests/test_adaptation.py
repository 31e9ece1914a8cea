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


def test_the_tables_say_what_was_measured_and_chosen() -> None:
    every = {f"{steps} × {rate:g}": [1.0] * 4 for steps in (1, 2, 5) for rate in adaptation.RATES}
    trials = [
        {"policy": policy, "setting": 0, "seed": seed, **every, "before": [1.0] * 4, "2 × 3": best}
        for policy in adaptation.SETTINGS
        for seed, best in ((0, [30.0] * 4), (1, [50.0] * 4))
    ]
    record = {
        "trials": trials,
        "chosen": {policy: adaptation.choose(trials, policy) for policy in adaptation.SETTINGS},
        # As they finished, which is in no order.
        "measured": [
            {"policy": policy, "setting": 0, "seed": seed, "before": [seed] * 4, "2 × 3": [7.0] * 4}
            for seed in (12, 10, 11)
            for policy in adaptation.SETTINGS
        ],
    }
    head, _, *rows = adaptation.table(record).splitlines()
    assert "3 seeds × 4 tasks" in head and len(rows) == 6
    assert "MAML, adapted" in rows[0] and "7.0 [7.0, 7.0]" in rows[0]
    assert "MAML, before" in rows[1] and "11.0 [" in rows[1] and "10.0 to 12.0" in rows[1]
    chosen = adaptation.table(record, "chosen").splitlines()[2:]
    assert [row.split("|")[1].strip() for row in chosen] == ["maml", "all", "average"]
    assert "2 × 3" in chosen[0] and "40.0" in chosen[0]
