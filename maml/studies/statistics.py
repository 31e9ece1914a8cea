"""How sure a difference of two learners is that were tested on the same tasks.

Two questions are told apart. *These runs*: are the trained networks different, on other tasks of
the same kind? Each pair of a seed and a task is one observation, of the difference on that task; it
is resampled (Efron 1987, BCa). *Over seeds*: would runs of other seeds differ, too? There each seed
is one observation, its mean difference, and Student's t says what few of them can say. Intervals
over tasks alone say nothing about other seeds (arXiv:2409.02850, arXiv:2511.19794).

Paired, a task's difficulty, which both learners share, drops out: at a correlation ρ of their
scores an unpaired interval is 1/√(1 − ρ) times as wide.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from maml.plots.curves import mean_and_spread

Floats = NDArray[np.float64]

RESAMPLES = 9999
LEVEL, POWER = 0.95, 0.8


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """What is known of a difference a − b.

    Attributes:
        seeds: How many seeds.
        tasks: How many tasks of each.
        runs: Over other tasks, for these runs.
        p: Two-sided, of the same question: signs of the pairs' differences are flipped.
        correlation: Of both scores over the tasks of a seed, the mean over seeds; None where all
            tasks score the same.
        detectable: The smallest difference that would have been shown, in four studies of five.
        over_seeds: Over other seeds; None for one seed.
        p_seeds: Two-sided, Student's, of the same question as ``over_seeds``; None for one seed.
            To flip the signs of a handful of seeds would never give a small p.
        detectable_seeds: As ``detectable``, over seeds; None for one seed.
    """

    seeds: int
    tasks: int
    runs: Interval
    p: float
    correlation: float | None
    detectable: float
    over_seeds: Interval | None
    p_seeds: float | None
    detectable_seeds: float | None


def difference(a: Floats, b: Floats, seed: int = 0) -> Difference:
    """Compare scores ``a [S, T]`` and ``b [S, T]`` of S seeds on the same T tasks each.

    Args:
        a: Scores of one learner.
        b: Of the other.
        seed: Of the resampling: the same scores give the same answer.
    """
    d = a - b
    seeds, tasks = d.shape
    pairs = d.reshape(-1)
    low, high = bca(pairs, seed)
    each, several = d.mean(axis=1), seeds > 1
    return Difference(
        seeds=seeds,
        tasks=tasks,
        runs=Interval(float(pairs.mean()), float(low), float(high)),
        p=sign_flip(pairs, seed),
        correlation=_correlation(a, b),
        detectable=_detectable(pairs, stats.norm),
        over_seeds=over_seeds(each) if several else None,
        p_seeds=_student(each) if several else None,
        detectable_seeds=_detectable(each, stats.t(seeds - 1)) if several else None,
    )


def _detectable(values: Floats, law: Any) -> float:
    """Return the mean of ``values [n]`` that `POWER` of all studies would show to be none."""
    return float(law.ppf([0.5 + LEVEL / 2, POWER]).sum() * stats.sem(values))


def bca(values: Floats, seed: int = 0, resamples: int = RESAMPLES) -> tuple[Floats, Floats]:
    """Return the ends of the 95 % BCa bootstrap interval of the mean of ``values [..., n]``."""
    mean = values.mean(axis=-1)
    if values.shape[-1] < 2:
        return np.full_like(mean, -np.inf), np.full_like(mean, np.inf)
    with warnings.catch_warnings():
        # Of rows whose values are all the same: their interval is a point, set below.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        found = stats.bootstrap(
            (values,), np.mean, axis=-1, vectorized=True, n_resamples=resamples, batch=200,
            confidence_level=LEVEL, method="BCa", rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    constant = np.ptp(values, axis=-1) == 0
    low, high = (np.where(constant, mean, end) for end in (found.low, found.high))
    return low, high


def over_seeds(means: Floats) -> Interval:
    """Return the mean of ``means [S]``, a number a seed, and Student's interval."""
    mean, half = mean_and_spread(means.tolist())
    return Interval(mean, mean - half, mean + half)


def as_published(scores: Floats) -> Interval:
    """Return the mean of ``scores [n]`` ± 1.96·σ/√n: over tasks that are drawn again and again."""
    mean, half = float(scores.mean()), float(1.96 * stats.sem(scores))
    return Interval(mean, mean - half, mean + half)


def sign_flip(values: Floats, seed: int = 0) -> float:
    """Return how often the mean of ``values [n]`` is as far from 0 with its signs flipped.

    Of `RESAMPLES` draws and the one at hand.
    """
    n, far = values.size, abs(values.sum()) * (1 - 1e-12)
    generator, as_far = np.random.default_rng(seed), 1
    for begin in range(0, RESAMPLES, 500):
        rows = min(500, RESAMPLES - begin)
        signs = generator.integers(0, 2, (rows, n), dtype=np.int8) * 2.0 - 1.0
        as_far += int((abs(signs @ values) >= far).sum())
    return as_far / (RESAMPLES + 1)


def verdicts(found: Sequence[Difference]) -> list[tuple[float, float | None, str]]:
    """Return for each difference both p-values, corrected for their number, and what is shown."""
    runs = holm([each.p for each in found])
    several = [each.p_seeds for each in found if each.p_seeds is not None]
    seeds = iter(holm(several))
    said: list[tuple[float, float | None, str]] = []
    for each, p in zip(found, runs, strict=True):
        p_seeds = None if each.p_seeds is None else next(seeds)
        if p_seeds is not None and p_seeds <= 1 - LEVEL:
            shown = "holds over seeds"
        elif p <= 1 - LEVEL:
            many = "one seed" if each.seeds == 1 else f"{each.seeds} seeds"
            shown = f"holds for these runs; over seeds not shown ({many})"
        else:
            shown = "not shown"
        said.append((p, p_seeds, shown))
    return said


def holm(p: list[float]) -> list[float]:
    """Return p-values for several comparisons at once (Holm 1979)."""
    order, adjusted, least = sorted(range(len(p)), key=lambda i: p[i]), list(p), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted


def _student(means: Floats) -> float:
    if np.ptp(means) == 0:
        return float(means[0] == 0)
    return float(stats.ttest_1samp(means, 0.0).pvalue)


def _correlation(a: Floats, b: Floats) -> float | None:
    found = [
        float(np.corrcoef(x, y)[0, 1])
        for x, y in zip(a, b, strict=True)
        if np.ptp(x) > 0 and np.ptp(y) > 0
    ]
    return sum(found) / len(found) if found else None
