"""Intervals cover what they say, on data whose true difference is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from maml.studies import statistics

STUDIES, SEEDS, TASKS, QUERIES = 1000, 3, 50, 25


def studies(rng: np.random.Generator, spread: float = 0.0) -> tuple[np.ndarray, np.ndarray, float]:
    """Accuracies ``[STUDIES, SEEDS, TASKS]`` of two learners, and the true difference of them.

    Both meet the same tasks, whose difficulty they share. ``spread``: how much seeds differ.
    """
    difficulty = rng.normal(1.2, 0.8, (STUDIES, SEEDS, TASKS))
    shift = spread * rng.normal(size=(2, STUDIES, SEEDS, 1))
    a, b = (1 / (1 + np.exp(-difficulty - edge)) for edge in (0.15, 0.0))
    # The mean of the logistic over the difficulties.
    x = np.linspace(-8, 8, 4001)
    w = stats.norm.pdf(x) / stats.norm.pdf(x).sum()
    truth = [float((w / (1 + np.exp(-(1.2 + 0.8 * x) - edge))).sum()) for edge in (0.15, 0.0)]
    scores = (rng.binomial(QUERIES, p) / QUERIES for p in (a, b))
    first, second = (each + by for each, by in zip(scores, shift, strict=True))
    return first, second, truth[0] - truth[1]


def coverage(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    return float(((low <= truth) & (truth <= high)).mean())


def test_paired_intervals_cover_and_unpaired_ones_are_twice_as_wide() -> None:
    rng = np.random.default_rng(0)
    # Nearly no noise of their own: scores that correlate at 0.75.
    shared, own = rng.normal(0, 1, (STUDIES, 150)), rng.normal(0, 1, (2, STUDIES, 150))
    a, b = (np.sqrt(0.75) * shared + np.sqrt(0.25) * noise for noise in own)
    low, high = statistics.bca(a - b + 0.1, resamples=999)
    assert 0.93 < coverage(low, high, 0.1) < 0.97
    unpaired = 2 * 1.96 * np.sqrt((a.var(1, ddof=1) + b.var(1, ddof=1)) / 150)
    assert 1.9 < unpaired.mean() / (high - low).mean() < 2.1

    a, b, truth = studies(rng)
    low, high = statistics.bca((a - b).reshape(STUDIES, -1), resamples=999)
    assert 0.93 < coverage(low, high, truth) < 0.97


def test_intervals_over_seeds_cover_where_seeds_differ() -> None:
    """And those over tasks alone do not: why both are told apart."""
    a, b, truth = studies(np.random.default_rng(1), spread=0.05)
    each = [statistics.over_seeds(d) for d in (a - b).mean(axis=-1)]
    low, high = (np.array([getattr(one, end) for one in each]) for end in ("low", "high"))
    assert 0.93 < coverage(low, high, truth) < 0.97
    low, high = statistics.bca((a - b).reshape(STUDIES, -1), resamples=299)
    assert coverage(low, high, truth) < 0.6


def test_sign_flips_are_those_of_scipy_and_fair() -> None:
    rng = np.random.default_rng(2)
    few = rng.normal(0.4, 1, 9)
    found = stats.permutation_test(
        (few,), np.mean, permutation_type="samples", vectorized=True, n_resamples=np.inf
    )
    assert statistics.sign_flip(few) == pytest.approx(found.pvalue, abs=0.02)
    many = rng.normal(0.05, 1, 2000)
    assert statistics.sign_flip(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.02)
    # Where there is no difference, one in twenty is below 0.05.
    p = [statistics.sign_flip(row) for row in rng.normal(0, 1, (200, 10))]
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.08


def test_a_difference_is_said_in_full() -> None:
    rng = np.random.default_rng(3)
    difficulty = rng.normal(0.8, 0.1, (4, 300))
    a, b = (difficulty + rng.normal(edge, 0.03, (4, 300)) for edge in (0.02, 0.0))
    found = statistics.difference(a, b)
    assert (found.seeds, found.tasks) == (4, 300)
    assert found.runs.low < found.runs.mean < found.runs.high
    assert found.runs.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert found.p < 0.001
    assert found.correlation == pytest.approx(0.01 / (0.01 + 0.03**2), abs=0.03)
    assert found.detectable == pytest.approx(2.8 * 0.03 * 2**0.5 / 1200**0.5, rel=0.05)
    over = found.over_seeds
    assert over is not None and found.p_seeds is not None
    assert (over.low > 0) == (found.p_seeds < 0.05)
    one = statistics.difference(a[:1], b[:1])
    assert one.over_seeds is one.p_seeds is one.detectable_seeds is None
    none = statistics.difference(a, a)
    assert [shown for _, _, shown in statistics.verdicts([found, one, none])] == [
        "holds over seeds", "holds for these runs; over seeds not shown (one seed)", "not shown",
    ]  # fmt: skip
    assert statistics.difference(a, a).runs == statistics.Interval(0.0, 0.0, 0.0)


def test_the_detectable_difference_is_detected_in_four_studies_of_five() -> None:
    rng = np.random.default_rng(4)
    d = rng.normal(0, 0.2, (STUDIES, 100))
    least = statistics.difference(d[:1], np.zeros((1, 100))).detectable
    assert least == pytest.approx(2.8 * 0.02, rel=0.2)
    low, _ = statistics.bca(d + 2.8016 * 0.02, resamples=499)
    assert 0.76 < (low > 0).mean() < 0.84


def test_holm() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([]) == []
    assert math.isclose(statistics.holm([0.6, 0.7])[1], 1.0)
