"""Test the difference of two learners that were tested on the same tasks.

There are two questions. *These runs*: do the trained networks differ on other tasks of the same
kind? Each pair of seed and task is one observation: the difference on this task. *Over seeds*:
would runs with other seeds differ, too? Each seed is one observation: its mean difference.
Intervals over tasks give no evidence about other seeds (arXiv:2409.02850, arXiv:2511.19794). Tasks
have the interval and p of `maml.evaluation.intervals`, which hold for skewed scores, too. Seeds are
too few to show a skewness, so they have Student's. The scores are paired, so a task's difficulty,
which both learners share, drops out.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from maml.evaluation.intervals import ALIKE, LEVEL, Floats, interval, p_of_zero

POWER = 0.8


class Shown(NamedTuple):
    """The evidence of a sample of differences: its mean, the mean's 95 % interval and p-value."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided."""
    detectable: float
    """The smallest difference that would have been shown, in four studies of five."""


class Difference(NamedTuple):
    """The evidence for a difference a − b: for these runs, and over seeds if there are several."""

    seeds: int
    runs: Shown
    over_seeds: Shown | None


def difference(a: Floats, b: Floats) -> Difference:
    """Compare scores ``a [S, T]`` and ``b [S, T]`` of S seeds on the same T tasks each."""
    d = a - b
    each, over = d.reshape(-1), shown(d.mean(axis=1)) if len(d) > 1 else None
    runs = shown(each)
    if np.ptp(each) >= ALIKE:
        low, high = interval(each)
        runs = runs._replace(low=low, high=high, p=p_of_zero(each))
    return Difference(len(d), runs, over)


def shown(values: Floats) -> Shown:
    """Return Student's t statistics for the mean of ``values [n]``, n ≥ 2.

    Equal values tell nothing about the spread: interval and ``detectable`` are nan, and p is that
    of the sign test.
    """
    if np.ptp(values) < ALIKE:
        same = float(values[0])
        if abs(same) < ALIKE:
            return Shown(same, same, same, 1.0, 0.0)
        return Shown(same, math.nan, math.nan, 0.5 ** (len(values) - 1), math.nan)
    found = stats.ttest_1samp(values, 0.0)
    law = stats.t(len(values) - 1)
    detectable = float(law.ppf([0.5 + LEVEL / 2, POWER]).sum() * stats.sem(values))
    low, high = found.confidence_interval(LEVEL)
    return Shown(float(values.mean()), float(low), float(high), found.pvalue, detectable)


def verdicts(found: Sequence[Difference]) -> list[tuple[float, float | None, str]]:
    """Return each difference's p-values, corrected for multiple comparisons, and its verdict."""
    runs = holm([each.runs.p for each in found])
    seeds = iter(holm([each.over_seeds.p for each in found if each.over_seeds is not None]))
    said: list[tuple[float, float | None, str]] = []
    for each, p in zip(found, runs, strict=True):
        p_seeds = None if each.over_seeds is None else next(seeds)
        if p_seeds is not None and p_seeds <= 1 - LEVEL:
            verdict = "holds over seeds"
        elif p <= 1 - LEVEL:
            many = "one seed" if each.seeds == 1 else f"{each.seeds} seeds"
            verdict = f"holds for these runs; over seeds not shown ({many})"
        else:
            verdict = "not shown"
        said.append((p, p_seeds, verdict))
    return said


def holm(p: list[float]) -> list[float]:
    """Return the p-values ``p`` corrected for several comparisons (Holm 1979)."""
    order, adjusted, least = sorted(range(len(p)), key=lambda i: p[i]), list(p), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted
