"""A 95 % interval for the mean over test tasks that holds the truth where tasks are skewed.

Near 100 % most tasks score 1, and a few decide the mean. There the published form, mean ±
1.96·σ/√tasks, misses the truth far more often than in one study of twenty, for two reasons:

- The mean of skewed values is skewed. Hall (1992, On the removal of skewness by transformation,
  J. R. Stat. Soc. B 54:221) transforms Student's t by a monotone cubic to one that is not.
- The worst tasks are seldom in a sample. So each end counts its most extreme task once more, as in
  Clopper and Pearson (1934): the upper limit of a rate with k events has the shape of k + 1.

The interval is never narrower than Student's. An event that no task shows is in no interval.

Two learners that were tested on the same tasks are compared by the differences of their scores.
There are two questions. *These runs*: do the trained networks differ on other tasks of the same
kind? Each pair of seed and task is one observation: the difference on this task. *Over seeds*:
would runs with other seeds differ, too? Each seed is one observation: its mean difference.
Intervals over tasks give no evidence about other seeds (arXiv:2409.02850, arXiv:2511.19794). Tasks
have the interval above. Seeds are too few to show a skewness, so they have Student's. The scores
are paired, so a task's difficulty, which both learners share, drops out.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

LEVEL, POWER = 0.95, 0.8
ALIKE = 1e-12
"""Values that differ by less are equal, but for rounding."""


def interval(values: Floats, metric: str = "") -> list[float]:
    """Return both ends for the mean of ``values [n]`` of a metric; an accuracy's lie in [0, 1].

    Equal values, or one, tell nothing about the spread: then both ends are nan.
    """
    if np.ptp(values) < ALIKE:
        return [math.nan, math.nan]
    low, high = stats.t.interval(LEVEL, len(values) - 1, values.mean(), stats.sem(values))
    ends = [min(low, _low(values)), max(high, -_low(-values))]
    return np.clip(ends, 0, 1).tolist() if metric.endswith("accuracy") else ends


def is_skewed(values: Floats) -> bool:
    """Return whether ``values [n]`` are too few for Student's interval, because they are skewed.

    Cochran (1977, Sampling Techniques, section 2.15) asks for n > 25·skewness², so that an interval
    of 95 % fails in at most 6 % of studies.
    """
    return bool(np.ptp(values) > ALIKE and len(values) < 25 * stats.skew(values) ** 2)


def p_of_zero(values: Floats) -> float:
    """Return the two-sided p of the mean 0 for ``values [n]`` that are not all equal.

    It is below 0.05 where 0 is outside of the `interval`.
    """
    more, skew, n = _with_lowest(values if values.mean() > 0 else -values)
    at = more.mean() / more.std(ddof=1)
    cubic = at + skew * at**2 / 3 + skew**2 * at**3 / 27 + skew / (6 * n)
    by_hall = 2 * stats.t.sf(math.sqrt(n) * cubic, n - 1)
    return float(max(stats.ttest_1samp(values, 0.0).pvalue, min(1.0, by_hall)))


def _low(values: Floats) -> float:
    """Return Hall's lower end, at which the cubic is Student's quantile."""
    more, skew, n = _with_lowest(values)
    cubic = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) / math.sqrt(n)
    at = cubic
    if abs(skew) > 1e-4:  # else rounding would decide
        at = 3 / skew * (np.cbrt(1 + skew * (cubic - skew / (6 * n))) - 1)
    return float(more.mean() - more.std(ddof=1) * at)


def _with_lowest(values: Floats) -> tuple[Floats, float, int]:
    """Return ``values`` with the lowest once more, their skewness, and their number."""
    more = np.append(values, values.min())
    return more, float(stats.skew(more)), len(more)


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
    tasks, over = d.reshape(-1), shown(d.mean(axis=1)) if len(d) > 1 else None
    runs = shown(tasks)
    if np.ptp(tasks) >= ALIKE:
        low, high = interval(tasks)
        runs = runs._replace(low=low, high=high, p=p_of_zero(tasks))
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
    test = stats.ttest_1samp(values, 0.0)
    law = stats.t(len(values) - 1)
    detectable = float(law.ppf([0.5 + LEVEL / 2, POWER]).sum() * stats.sem(values))
    low, high = test.confidence_interval(LEVEL)
    return Shown(float(values.mean()), float(low), float(high), test.pvalue, detectable)


def verdicts(of: Sequence[Difference]) -> list[tuple[float, float | None, str]]:
    """Return each difference's p-values, corrected for multiple comparisons, and its verdict."""
    runs = holm([d.runs.p for d in of])
    seeds = iter(holm([d.over_seeds.p for d in of if d.over_seeds is not None]))
    said: list[tuple[float, float | None, str]] = []
    for d, p in zip(of, runs, strict=True):
        p_seeds = None if d.over_seeds is None else next(seeds)
        if p_seeds is not None and p_seeds <= 1 - LEVEL:
            verdict = "holds over seeds"
        elif p <= 1 - LEVEL:
            many = "one seed" if d.seeds == 1 else f"{d.seeds} seeds"
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
