"""What a comparison says: tables in Markdown, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maml.plots import style
from maml.studies import pictures
from maml.studies.arms import Arm, paired
from maml.studies.markdown import grid
from maml.studies.statistics import (
    Difference,
    Floats,
    Interval,
    as_published,
    difference,
    over_seeds,
    verdicts,
)

LEGEND = """\
Δ is the row's mean minus that of {base}, on the test tasks of both. *These runs*: of the trained
networks on other tasks, by a BCa bootstrap over pairs of seed and task, and p by flipping signs.
*Over seeds*: of other seeds, too, by Student's interval and p of the seeds' mean differences.
*Detectable*: the smallest Δ that would have been shown in four studies of five. Intervals are of
95 %.{holm}
"""

ENOUGH, NEAR = 200, 0.97
FEW = (
    "\n\n**Too few tasks** near 100 %: {names}. Below 200 tasks a 95 % interval over tasks holds "
    "the truth in only 89 to 92 % of studies, as most score the same. Test more (`--test-tasks`)."
)


@dataclass(frozen=True)
class Unit:
    """How a metric is shown: an accuracy in percent, a difference of two in percentage points."""

    metric: str

    @property
    def percent(self) -> bool:
        """Whether it is an accuracy."""
        return self.metric.endswith("accuracy")

    def plain(self, value: float) -> str:
        """Show a value."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"

    def signed(self, value: float) -> str:
        """Show a difference."""
        return f"{100 * value:+.2f}" if self.percent else f"{value:+.4g}"

    def between(self, interval: Interval | None) -> str:
        """Show the ends of a difference's interval."""
        if interval is None:
            return "–"
        return f"{self.signed(interval.low)} to {self.signed(interval.high)}"

    def around(self, interval: Interval) -> str:
        """Show a symmetric interval."""
        mean, half = interval.mean, (interval.high - interval.low) / 2
        if self.percent:
            return f"{100 * mean:.2f} ± {100 * half:.2f} %"
        return f"{mean:.4g} ± {half:.2g}"


def means_of(arm: Arm) -> tuple[Interval, Interval | None, int, int]:
    """Return an arm's mean with its interval over tasks and over seeds; how many of both."""
    each: list[Floats] = [np.array(list(of_seed.values())) for of_seed in arm.scores.values()]
    seeds = np.array([of_seed.mean() for of_seed in each])
    published = as_published(np.concatenate(each))
    return published, over_seeds(seeds) if len(each) > 1 else None, len(each), len(each[0])


def means_table(arms: Sequence[Arm], unit: Unit) -> str:
    """Return a table of means, each ± its interval over tasks and over seeds, and a warning."""
    rows, few = [["", f"{unit.metric}, ± over tasks", "± over seeds", "seeds", "tasks each"]], []
    for arm in arms:
        published, seeds, n, tasks = means_of(arm)
        over = "–" if seeds is None else unit.around(seeds)
        rows.append([arm.name, unit.around(published), over, str(n), str(tasks)])
        if unit.percent and n * tasks < ENOUGH and published.mean >= NEAR:
            few.append(arm.name)
    return grid(rows[0], rows[1:]) + (FEW.format(names=", ".join(few)) if few else "")


def differences_table(found: dict[str, Difference], base: str, unit: Unit) -> str:
    """Return a table of differences, with what it says below."""
    if not found:
        return ""
    said = verdicts(list(found.values()))
    rows = [[
        "", "Δ", "these runs", "p", "over seeds", "p", "correlation", "detectable", "verdict",
    ]]  # fmt: skip
    for (name, each), (p, p_seeds, verdict) in zip(found.items(), said, strict=True):
        detectable = unit.plain(each.detectable)
        if each.detectable_seeds is not None:
            detectable += f"; over seeds {unit.plain(each.detectable_seeds)}"
        rows.append(
            [
                name, unit.signed(each.runs.mean), unit.between(each.runs), _p(p),
                unit.between(each.over_seeds), "–" if p_seeds is None else _p(p_seeds),
                "–" if each.correlation is None else f"{each.correlation:.2f}", detectable,
                verdict,
            ]
        )  # fmt: skip
    many = (
        f" Each p is Holm's, for {len(found)} comparisons; an interval is of one alone."
        if len(found) > 1
        else ""
    )
    points = " Differences are in percentage points." if unit.percent else ""
    return f"{grid(rows[0], rows[1:])}\n\n{LEGEND.format(base=base, holm=many + points)}"


def compared(arms: Sequence[Arm], folder: Path | None = None) -> tuple[str, str]:
    """Compare arms with the first of them, on the test tasks that they share.

    Args:
        arms: Two or more.
        folder: Where means and differences are drawn; None: they are not.

    Returns:
        Both tables in Markdown, and the links to what was drawn.

    Raises:
        UserError: where two arms share no tasks.
    """
    base, *others = arms
    unit, found = Unit(base.metric), {}
    for arm in others:
        ours, theirs, _ = paired(arm, base)
        found[arm.name] = difference(ours, theirs)
    text = f"{means_table(arms, unit)}\n\n{differences_table(found, base.name, unit)}"
    if folder is None:
        return text, ""
    means = {arm.name: means_of(arm)[:2] for arm in arms}
    apart = {f"{name}\n− {base.name}": (each.runs, each.over_seeds) for name, each in found.items()}
    drawn = {"means": pictures.intervals(means, unit.metric)}
    if apart:
        drawn["differences"] = pictures.intervals(apart, unit.metric, differences=True)
    for name, figure in drawn.items():
        style.save(figure, folder / name)
    return text, "".join(f"\n![{name}]({name}.png)\n" for name in drawn)


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
