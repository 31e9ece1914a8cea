"""What a comparison says: tables in Markdown, and a figure."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maml.plots import style
from maml.plots.style import BLACK, BLUE, GREY
from maml.studies.arms import Arm, paired
from maml.studies.markdown import grid
from maml.studies.statistics import (
    Difference,
    Floats,
    Interval,
    difference,
    shown,
    verdicts,
)

LEGEND = """\
Δ is the row's mean minus that of {base}, on the test tasks of both. *These runs*: of the trained
networks on other tasks, each pair of seed and task being an observation. *Over seeds*: of other
seeds, too, each seed being one. Every interval, ± too, is Student's of 95 %. *Detectable*: the
smallest Δ that would have been shown in four studies of five.{holm}
"""


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

    def between(self, interval: Interval) -> str:
        """Show the ends of a difference's interval."""
        return f"{self.signed(interval.low)} to {self.signed(interval.high)}"

    def around(self, interval: Interval) -> str:
        """Show a symmetric interval."""
        mean, half = interval.mean, (interval.high - interval.low) / 2
        if self.percent:
            return f"{100 * mean:.2f} ± {100 * half:.2f} %"
        return f"{mean:.4g} ± {half:.2g}"


def means_table(arms: Sequence[Arm], unit: Unit) -> str:
    """Return a table of means, each ± its interval over tasks and over seeds."""
    rows = []
    for arm in arms:
        each: list[Floats] = [np.array(list(of_seed.values())) for of_seed in arm.scores.values()]
        mean, over = unit.around(shown(np.concatenate(each)).interval), "–"
        if len(each) > 1:
            over = unit.around(shown(np.array([of_seed.mean() for of_seed in each])).interval)
        rows.append([arm.name, mean, over, str(len(each)), str(len(each[0]))])
    return grid(["", f"{unit.metric}, ± over tasks", "± over seeds", "seeds", "tasks each"], rows)


def differences_table(found: dict[str, Difference], base: str, unit: Unit) -> str:
    """Return a table of differences, with what it says below."""
    if not found:
        return ""
    rows = []
    for (name, d), (p, p_seeds, verdict) in zip(
        found.items(), verdicts(list(found.values())), strict=True
    ):
        runs, seeds = d.runs, d.over_seeds
        cells = [unit.signed(runs.interval.mean), unit.between(runs.interval), _p(p)]
        detectable = unit.plain(runs.detectable)
        if seeds is None or p_seeds is None:
            cells += ["–", "–"]
        else:
            cells += [unit.between(seeds.interval), _p(p_seeds)]
            detectable += f"; over seeds {unit.plain(seeds.detectable)}"
        rows.append([name, *cells, detectable, verdict])
    header = ["", "Δ", "these runs", "p", "over seeds", "p", "detectable", "verdict"]
    many = (
        f" Each p is Holm's, for {len(found)} comparisons; an interval is of one alone."
        if len(found) > 1
        else ""
    )
    points = " Differences are in percentage points." if unit.percent else ""
    return f"{grid(header, rows)}\n\n{LEGEND.format(base=base, holm=many + points)}"


def compared(arms: Sequence[Arm], folder: Path | None = None) -> tuple[str, str]:
    """Compare arms with the first of them, on the test tasks that they share.

    Args:
        arms: Two or more.
        folder: Where the differences are drawn; None: they are not.

    Returns:
        Both tables in Markdown, and the link to what was drawn.

    Raises:
        UserError: where two arms share no tasks.
    """
    base, *others = arms
    unit, found = Unit(base.metric), {}
    for arm in others:
        ours, theirs, _ = paired(arm, base)
        found[arm.name] = difference(ours, theirs)
    text = f"{means_table(arms, unit)}\n\n{differences_table(found, base.name, unit)}"
    if folder is None or not found:
        return text, ""
    style.save(_drawn(found, base.name, unit), folder / "differences")
    return text, "\n![differences](differences.png)\n"


def _drawn(found: dict[str, Difference], base: str, unit: Unit) -> Any:
    """Draw a difference a row, its interval over tasks, and a thinner one over seeds."""
    names = [textwrap.fill(name, 40) for name in found]
    lines = "\n".join(names).count("\n") + 1
    drawn, ((axis,),) = style.figure(size=(7.0, 1.0 + 0.15 * lines + 0.2 * len(names)))
    scale = 100 if unit.percent else 1
    for y, each in enumerate(found.values()):
        for found_by, over, look in (
            (each.over_seeds, "seeds", {"marker": "|", "color": GREY, "linewidth": 1.2}),
            (each.runs, "tasks (these runs)", {"color": BLUE, "linewidth": 4, "alpha": 0.55}),
        ):
            if found_by is not None:
                ends, label = [scale * end for end in found_by.interval[1:]], f"95 % over {over}"
                axis.plot(ends, (y, y), label=label, solid_capstyle="butt", markersize=8, **look)
        axis.plot(scale * each.runs.interval.mean, y, "o", color=BLUE, markersize=5)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.axvline(0, color=BLACK, linewidth=0.8, zorder=0)
    points = ", percentage points" if unit.percent else ""
    x = f"test {unit.metric} minus that of {base}{points}"
    style.finish(axis, textwrap.fill(x, 44), "")
    return drawn


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
