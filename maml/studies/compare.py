"""``python -m launch.compare A B …``: is one better than the other, and how sure is that.

    python -m launch.compare runs/maml runs/anil
    python -m launch.compare runs/sweeps/order:order=first runs/sweeps/order:order=second --report

Each is a run directory, a record, or a folder of runs of which the values after the colon choose
some; its runs may differ in their seed alone. All are compared with the first, on the test tasks
that both were tested on.
"""

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maml.config.parser import Parser
from maml.errors import UserError
from maml.plots import style
from maml.plots.style import BLACK, BLUE, GREY
from maml.run.files import make_folder, write_text
from maml.studies.arms import Arm, paired, read
from maml.studies.markdown import grid
from maml.studies.statistics import Difference, Floats, Shown, difference, shown, verdicts

LEGEND = """\
Δ is the row's mean minus that of {base}, on the test tasks of both. *These runs*: of the trained
networks on other tasks, each pair of seed and task being an observation. *Over seeds*: of other
seeds, too, each seed being one. Every interval, ± too, is Student's of 95 %. *Detectable*: the
smallest Δ that would have been shown in four studies of five.{more}
"""


def main(arguments: list[str]) -> int:
    """Compare; return the exit code."""
    parser = Parser(
        prog="python -m launch.compare",
        description="Compare runs on the test tasks that they share.",
    )
    parser.add_argument("arms", metavar="RUNS", nargs="+", help="PATH or PATH:name=value,…")
    parser.add_argument(
        "--metric",
        help="a column of test_tasks.csv, as non_transductive_accuracy (default: each run's "
        "headline accuracy; of policies the return, of regressions the loss)",
    )
    parser.add_argument("--report", action="store_true", help="write report.md, with figures")
    parser.add_argument(
        "--folder", type=Path, help="where the report goes (default: runs/compared-<time>)"
    )
    options = parser.parse_args(arguments)
    if len(options.arms) < 2:
        raise UserError("nothing to compare with: name two runs or more")
    if len(set(options.arms)) < len(options.arms):
        raise UserError("one is named twice")
    found = [read(asked, options.metric) for asked in options.arms]
    print(f"Comparing {len(found)} by test {found[0].metric}", file=sys.stderr, flush=True)
    folder = options.folder
    if options.report and folder is None:
        folder = Path("runs", f"compared-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder is not None:
        make_folder(folder, "--folder")
    text, drawn = compared(found, folder)
    print(text, end="")
    if folder is not None:
        write_text(folder / "report.md", f"# Comparison\n\n{text}{drawn}")
        print(f"\nreport {folder / 'report.md'}")
    return 0


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

    def between(self, found: Shown) -> str:
        """Show the ends of a difference's interval."""
        return f"{self.signed(found.low)} to {self.signed(found.high)}"

    def around(self, values: Floats) -> str:
        """Show the mean of values, and its symmetric interval."""
        found = shown(values)
        mean, half = found.mean, (found.high - found.low) / 2
        return (
            f"{100 * mean:.2f} ± {100 * half:.2f} %" if self.percent else f"{mean:.4g} ± {half:.2g}"
        )


def means_table(arms: Sequence[Arm], unit: Unit) -> str:
    """Return a table of means, each ± its interval over tasks and over seeds."""
    rows = []
    for arm in arms:
        each: list[Floats] = [np.array(list(of_seed.values())) for of_seed in arm.scores.values()]
        mean, over = unit.around(np.concatenate(each)), "–"
        if len(each) > 1:
            over = unit.around(np.array([of_seed.mean() for of_seed in each]))
        rows.append([arm.name, mean, over, str(len(each)), str(len(each[0]))])
    return grid(["", f"{unit.metric}, ± over tasks", "± over seeds", "seeds", "tasks each"], rows)


def differences_table(found: dict[str, Difference], base: str, unit: Unit) -> str:
    """Return a table of differences, with what it says below."""
    rows, judged = [], verdicts(list(found.values()))
    for (name, d), (p, p_seeds, verdict) in zip(found.items(), judged, strict=True):
        runs, seeds = d.runs, d.over_seeds
        cells = [unit.signed(runs.mean), unit.between(runs), _p(p)]
        detectable = unit.plain(runs.detectable)
        if seeds is None or p_seeds is None:
            cells += ["–", "–"]
        else:
            cells += [unit.between(seeds), _p(p_seeds)]
            detectable += f"; over seeds {unit.plain(seeds.detectable)}"
        rows.append([name, *cells, detectable, verdict])
    header = ["", "Δ", "these runs", "p", "over seeds", "p", "detectable", "verdict"]
    more = ""
    if len(found) > 1:
        more = f" Each p is Holm's, for {len(found)} comparisons; an interval is of one alone."
    if unit.percent:
        more += " Differences are in percentage points."
    return f"{grid(header, rows)}\n\n{LEGEND.format(base=base, more=more)}"


def compared(arms: Sequence[Arm], folder: Path | None = None) -> tuple[str, str]:
    """Compare arms with the first of them, on the test tasks that they share.

    Returns both tables in Markdown, and the link to what was drawn in ``folder``, if there is one.
    """
    base, *others = arms
    unit, found = Unit(base.metric), {}
    for arm in others:
        ours, theirs, _ = paired(arm, base)
        found[arm.name] = difference(ours, theirs)
    text = f"{means_table(arms, unit)}\n\n{differences_table(found, base.name, unit)}"
    if folder is None:
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
                ends = scale * found_by.low, scale * found_by.high
                label = f"95 % over {over}"
                axis.plot(ends, (y, y), label=label, solid_capstyle="butt", markersize=8, **look)
        axis.plot(scale * each.runs.mean, y, "o", color=BLUE, markersize=5)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.axvline(0, color=BLACK, linewidth=0.8, zorder=0)
    points = ", percentage points" if unit.percent else ""
    x = f"test {unit.metric} minus that of {base}{points}"
    style.finish(axis, textwrap.fill(x, 44), "")
    return drawn


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
