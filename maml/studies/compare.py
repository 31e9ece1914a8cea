"""``python -m launch.compare A B …``: test whether one learner is better, and how sure this is.

    python -m launch.compare runs/maml runs/anil
    python -m launch.compare runs/sweeps/order:order=first runs/sweeps/order:order=second --report

Each argument is a run directory, a record, or a folder of runs. Values after a colon choose some of
a folder's runs. The runs of one argument may differ only in their seed. The command compares each
argument with the first, on the test tasks that both share.
"""

import math
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasets.components import is_theirs
from maml.config import registry
from maml.config.parser import Parser
from maml.errors import UserError
from maml.evaluation import intervals
from maml.evaluation.intervals import Difference, Floats, Shown
from maml.plots import style
from maml.plots.style import BLACK, BLUE, GREY
from maml.run.files import make_folder, write_text
from maml.run.reading import Run
from maml.studies import files, grid
from maml.studies.arms import Arm, paired, read

LEGEND = """\
Δ is the row's mean minus that of {base}, on the test tasks of both. *These runs*: of the trained
networks on other tasks, each pair of seed and task being an observation. *Over seeds*: of other
seeds, too, each seed being one. Every interval is of 95 %: over seeds, and after ±, Student's; else
one that holds for skewed scores, too (docs/protocols.md). *Detectable*: the smallest Δ that would
have been shown in four studies of five.{more}
"""

SKEWED = """

Too skewed for ±: {names}. A few tasks decide such a mean, so ± misses the truth more often than in
5 % of studies. Read the interval beside it, or test on more tasks (`--test-tasks`)."""
LOSSES = """

A learner of a user's own may state a loss of its own ({names}); then Δ is of two measures."""


def main(arguments: list[str]) -> int:
    """Compare; return the exit code."""
    parser = Parser(prog="python -m launch.compare", description=__doc__)
    parser.add_argument("arms", metavar="RUNS", nargs="+", help="PATH or PATH:name=value,…")
    text = "a column of test_tasks.csv (default: accuracy, return or loss, as each run's headline)"
    parser.add_argument("--metric", help=text)
    parser.add_argument("--report", action="store_true", help="write report.md, with figures")
    text = "where the report and its tables go (default: runs/compared-<time>)"
    parser.add_argument("--folder", type=Path, help=text)
    options = parser.parse_args(arguments)
    if len(options.arms) < 2:
        raise UserError("nothing to compare with: name two runs or more")
    if len(set(options.arms)) < len(options.arms):
        raise UserError("one is named twice")
    arms = [read(asked, options.metric) for asked in options.arms]
    print(f"Comparing {len(arms)} by test {arms[0].metric}", file=sys.stderr, flush=True)
    folder = options.folder
    if options.report and folder is None:
        folder = Path("runs", f"compared-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder is not None:
        make_folder(folder, "--folder")
    text, drawn = compared(arms, folder)
    print(text, end="")
    if folder is not None:
        write_text(folder / "report.md", f"# Comparison\n\n{text}{drawn}")
        print(f"\nreport {folder / 'report.md'}")
    return 0


def is_percent(metric: str) -> bool:
    """Return whether a metric is an accuracy, whose differences are in percentage points."""
    return metric.endswith("accuracy")


def plain(value: float, metric: str) -> str:
    """Return a metric's value as text; "?" if it is not known."""
    if math.isnan(value):
        return "?"
    return f"{100 * value:.2f} %" if is_percent(metric) else f"{value:.4g}"


def means_table(arms: Sequence[Arm], metric: str, folder: Path | None = None) -> str:
    """Return a table of means, each with its intervals over tasks and over seeds, and warnings.

    With a ``folder``, write it there as ``means.csv`` and ``means.tex``, too.
    """
    names = "name", metric, "half_width", "low", "high", "seeds", "half_width_over_seeds"
    columns = {name: list[Any]() for name in names}

    def half_width(values: Floats) -> float:
        found = intervals.shown(values)
        return (found.high - found.low) / 2

    def around(values: Floats) -> str:
        mean, half = intervals.shown(values).mean, half_width(values)
        if math.isnan(half):
            return f"{plain(mean, metric)}, all alike"
        percent = f"{100 * mean:.2f} ± {100 * half:.2f} %"
        return percent if is_percent(metric) else f"{mean:.4g} ± {half:.2g}"

    rows, skewed = [], []
    for arm in arms:
        seeds: list[Floats] = [np.array(list(of_seed.values())) for of_seed in arm.scores.values()]
        scores, means = np.concatenate(seeds), np.array([of_seed.mean() for of_seed in seeds])
        ends = intervals.interval(scores, metric)
        low, high = (plain(end, metric) for end in ends)
        over = around(means) if len(seeds) > 1 else "–"
        tasks = "–".join(map(str, sorted({min(map(len, seeds)), max(map(len, seeds))})))
        row = [arm.name, around(scores), f"{low} to {high}", over, str(len(seeds)), tasks]
        rows.append([*row, test_steps(arm.first)])
        wide = half_width(means) if len(seeds) > 1 else None
        numbers = [arm.name, scores.mean(), half_width(scores), *ends, len(seeds), wide]
        for column, number in zip(columns.values(), numbers, strict=True):
            column.append(number)
        if intervals.is_skewed(scores):
            skewed.append(arm.name)
    header = ["", f"{metric}, ± over tasks", "95 % interval", "± over seeds", "seeds", "tasks each"]
    header.append("test steps")
    text = grid(header, rows)
    if folder is not None:
        files.write(folder / "means", header, rows, columns)
    text += SKEWED.format(names=", ".join(skewed)) if skewed else ""
    learners = dict.fromkeys(arm.first.config.learner for arm in arms)
    differ = metric.endswith("loss") and len(learners) > 1 and any(map(is_theirs, learners))
    return text + (LOSSES.format(names=", ".join(learners)) if differ else "")


def test_steps(run: Run) -> str:
    """Return the inner steps at a run's test; "–" for a learner of ours that takes none."""
    facts = registry.known("learner").get(run.config.learner)
    return "–" if facts and not facts.adapts_at_test else str(run.config.eval_inner_steps)


def differences_table(
    shifts: dict[str, Difference], base: str, metric: str, folder: Path | None = None
) -> str:
    """Return a table of differences, with its legend below; the files are as in `means_table`."""

    def signed(value: float) -> str:
        return f"{100 * value:+.2f}" if is_percent(metric) else f"{value:+.4g}"

    def between(of: Shown, p: float) -> list[str]:
        said = "tied" if math.isnan(of.low) else f"{signed(of.low)} to {signed(of.high)}"
        return [said, "< 0.001" if p < 0.001 else f"{p:.3f}"]

    rows, judged = list[list[str]](), intervals.verdicts(list(shifts.values()))
    for (name, d), (p, p_seeds, verdict) in zip(shifts.items(), judged, strict=True):
        over_seeds, detectable = ["–", "–"], plain(d.runs.detectable, metric)
        if d.over_seeds is not None and p_seeds is not None:
            over_seeds = between(d.over_seeds, p_seeds)
            detectable += f"; over seeds {plain(d.over_seeds.detectable, metric)}"
        cells = [signed(d.runs.mean), *between(d.runs, p), *over_seeds]
        rows.append([name, *cells, detectable, verdict])
    header = ["", "Δ", "these runs", "p", "over seeds", "p", "detectable", "verdict"]
    if folder is not None:
        columns: dict[str, list[Any]] = {"name": [*shifts], "base": [base] * len(shifts)}
        for part, of in (("", "runs"), ("_over_seeds", "over_seeds")):
            for name in ("mean", "low", "high"):
                found = [getattr(getattr(d, of), name, None) for d in shifts.values()]
                columns[f"{name}{part}"] = found
        columns |= {"p": [p for p, _, _ in judged], "p_over_seeds": [p for _, p, _ in judged]}
        columns["verdict"] = [verdict for _, _, verdict in judged]
        files.write(folder / "differences", header, rows, columns)
    more = ""
    if len(shifts) > 1:
        more = f" Each p is Holm's, for {len(shifts)} comparisons; an interval is of one alone."
    if any(row.count("tied") for row in rows):
        more += " *tied*: all have the same Δ, so its spread is not known; p is the sign test's."
    if is_percent(metric):
        more += " Differences are in percentage points."
    return f"{grid(header, rows)}\n\n{LEGEND.format(base=base, more=more)}"


def compared(arms: Sequence[Arm], folder: Path | None = None) -> tuple[str, str]:
    """Return the tables of means and differences, and a link to the figure saved in ``folder``."""
    base, *others = arms
    found = {arm.name: intervals.difference(*paired(arm, base)) for arm in others}
    differences = differences_table(found, base.name, base.metric, folder)
    text = f"{means_table(arms, base.metric, folder)}\n\n{differences}"
    if folder is None:
        return text, ""
    style.save(_drawn(found, base.name, base.metric), folder / "differences")
    return text, "\n![differences](differences.png)\n"


def _drawn(differences: dict[str, Difference], base: str, metric: str) -> Any:
    """Draw one difference per row, its interval over tasks and a thinner one over seeds."""
    names = [textwrap.fill(name, 40) for name in differences]
    lines = "\n".join(names).count("\n") + 1
    drawn, ((axis,),) = style.figure(size=(7.0, 1.0 + 0.15 * lines + 0.2 * len(names)))
    scale, points = (100, ", percentage points") if is_percent(metric) else (1, "")
    for y, shift in enumerate(differences.values()):
        for found_by, over, look in (
            (shift.over_seeds, "seeds", {"marker": "|", "color": GREY, "linewidth": 1.2}),
            (shift.runs, "tasks (these runs)", {"color": BLUE, "linewidth": 4, "alpha": 0.55}),
        ):
            if found_by is not None:
                ends = scale * found_by.low, scale * found_by.high
                label = f"95 % over {over}"
                axis.plot(ends, (y, y), label=label, solid_capstyle="butt", markersize=8, **look)
        axis.plot(scale * shift.runs.mean, y, "o", color=BLUE, markersize=5)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(differences) - 0.4, -0.6)
    axis.axvline(0, color=BLACK, linewidth=0.8, zorder=0)
    x = f"test {metric} minus that of {base}{points}"
    style.finish(axis, textwrap.fill(x, 44), "")
    return drawn
