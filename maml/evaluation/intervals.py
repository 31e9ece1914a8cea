"""A 95 % interval for the mean over test tasks that holds the truth where tasks are skewed.

Near 100 % most tasks score 1, and a few decide the mean. There the published form, mean ±
1.96·σ/√tasks, misses the truth far more often than in one study of twenty, for two reasons:

- The mean of skewed values is skewed. Hall (1992, On the removal of skewness by transformation,
  J. R. Stat. Soc. B 54:221) transforms Student's t by a monotone cubic to one that is not.
- The worst tasks are seldom in a sample. So each end counts its most extreme task once more, as in
  Clopper and Pearson (1934): the upper limit of a rate with k events has the shape of k + 1.

The interval is never narrower than Student's. An event that no task shows is in no interval.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

LEVEL = 0.95
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
