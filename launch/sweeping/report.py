"""``report.md`` of a sweep: every setting, what each parameter does, which differences hold."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.markdown import grid
from launch.comparing import tables
from launch.comparing.arms import Arm, arm_of, other_tasks
from launch.sweeping.file import Metric
from launch.sweeping.metrics import metric_of
from launch.sweeping.sweep import (
    FAILED,
    FINISHED,
    LOST,
    STOPPED,
    Sweep,
    Trial,
    counts,
    latest,
    settings,
)
from maml.errors import UserError
from maml.plots import comparing, style
from maml.plots.curves import mean_and_spread
from maml.plots.runs import Run, read
from maml.run.files import write_text
from maml.run.task_scores import NAME

COMPARED = 12
"""So many settings, the best, are compared with the best one."""


def write(sweep: Sweep, against: str | None = None) -> Path:
    """Write the report of what is over so far, with its figures; return the file.

    Args:
        sweep: Any.
        against: The setting that the others are compared with, as its table names it; None: the
            best.

    Raises:
        UserError: if there is nothing to report, or it cannot be written; or if no setting is named
            so.
    """
    trials = sweep.trials()
    ranked = _ranked(sweep, trials)
    if ranked is None:
        raise UserError(f"--report: no trial in {sweep.folder} has a metric yet")
    metric, values = ranked
    grouped = {
        name: [trial for trial in of_setting if trial.number in values]
        for name, of_setting in settings(sweep.file, trials).items()
    }
    grouped = {name: of_setting for name, of_setting in grouped.items() if of_setting}
    order = sorted(
        grouped, key=lambda name: -metric.sign * _mean([values[t.number] for t in grouped[name]])
    )
    if against is not None and against not in order:
        raise UserError(f"--against {against}: no such setting; there are {', '.join(order)}")
    base = against or order[0]
    parts = [
        _head(sweep, trials, metric),
        _settings_table(order, grouped, values, metric),
        _effects(sweep, trials, values, metric),
        _differences(sweep, [base, *(name for name in order if name != base)], grouped),
        _failures(trials),
    ]
    path = sweep.folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _ranked(sweep: Sweep, trials: list[Trial]) -> tuple[Metric, dict[int, float]] | None:
    """Return what trials are ranked by, and its value for each that has one."""
    metric, values = sweep.file.metric, {}
    for trial in trials:
        if trial.state not in (FINISHED, STOPPED):
            continue
        found = metric_of(trial.run_dir, metric)
        if found is not None and math.isfinite(found[1]):
            metric, values[trial.number] = found
    return None if metric is None or not values else (metric, values)


def _head(sweep: Sweep, trials: list[Trial], metric: Metric) -> str:
    states = ", ".join(f"{n} {state}" for state, n in counts(trials).items())
    text = f"# Sweep {sweep.name}\n\n"
    if sweep.file.said.get("description"):
        text += f"{sweep.file.said['description']}. "
    text += (
        f"`{sweep.file.path}`, method {sweep.file.method}; trials: {states}. Ranked by "
        f"{metric.name} ({metric.goal}), the last value of each run"
    )
    if metric.name.startswith("validation/"):
        text += " (with `--test-model best`: of the model that is tested)"
    if metric.name.startswith("test/"):
        text += (
            ". **These are test tasks: what is best here was chosen on them, and is better here "
            "than on others**"
        )
    return text + "."


def _settings_table(
    order: list[str], grouped: dict[str, list[Trial]], values: dict[int, float], metric: Metric
) -> str:
    unit = tables.Unit(
        metric.name, *((100.0, " %") if metric.name.endswith("accuracy") else (1.0, ""))
    )
    rows = [["setting", f"{metric.name}, mean ± spread", "trials", "stopped early"]]
    for name in order:
        found = [values[trial.number] for trial in grouped[name]]
        mean, spread = _mean(found), _deviation(found)
        shown = unit.plain(mean)
        if spread is not None:
            half = f"{unit.scale * spread:.2f}" if unit.suffix else f"{spread:.2g}"
            shown = f"{shown.removesuffix(unit.suffix)} ± {half}{unit.suffix}"
        stopped = sum(trial.state == STOPPED for trial in grouped[name])
        rows.append([name, shown, str(len(found)), str(stopped or "–")])
    shown = grid(rows[0], rows[1:])
    return f"## Settings\n\n{shown}\n\nThe spread is the standard deviation over seeds."


def _effects(sweep: Sweep, trials: list[Trial], values: dict[int, float], metric: Metric) -> str:
    names = [name for name in sweep.file.varied if name != "seed"]
    if not names:
        return ""
    counted = [trial for trial in trials if trial.number in values]
    points, found = [t.point for t in counted], [values[t.number] for t in counted]
    style.save(comparing.main_effects(points, found, names, metric.name), sweep.folder / "effects")
    text = "## Main effects\n\n![main effects](effects.png)"
    unit = tables.Unit("", *((100.0, " %") if metric.name.endswith("accuracy") else (1.0, "")))
    rows = [["parameter", "value", "mean", "± 95 %", "trials"]]
    for name in names:
        levels = {str(point[name]): point[name] for point in points}
        if len(levels) > 12:
            continue
        for shown, level in levels.items():
            at = [value for point, value in zip(points, found, strict=True) if point[name] == level]
            mean, half = mean_and_spread(at)
            interval = f"{unit.scale * half:.2f}" if unit.suffix else f"{half:.2g}"
            rows.append(
                [name, shown, unit.plain(mean), interval if len(at) > 1 else "–", str(len(at))]
            )
    return text if len(rows) == 1 else f"{text}\n\n{grid(rows[0], rows[1:])}"


def _differences(sweep: Sweep, order: list[str], grouped: dict[str, list[Trial]]) -> str:
    """Compare settings with the first, on test tasks; "" where they were tested on none."""
    arms: list[Arm] = []
    left_out: list[str] = []
    for name in order[:COMPARED]:
        runs: list[Run] = [
            read(trial.run_dir) for trial in grouped[name] if (trial.run_dir / NAME).is_file()
        ]
        if not runs:
            continue
        try:
            arms.append(arm_of(name, runs, None))
        except UserError as error:  # a test whose losses are no numbers, say
            left_out.append(f"\n\n{name} is not compared: {error}.")
    title = "## Which differences hold\n\n"
    if len(arms) < 2:
        return f"{title}Of too few settings.{''.join(left_out)}" if left_out else ""
    base = arms[0]
    # Of a sweep over shots, say, only those with as many are tested on the same tasks.
    others = [arm for arm in arms[1:] if not other_tasks(base, arm)]
    unit = tables.unit_of(arms)
    try:
        found = tables.differences_from(base, others)
    except UserError as error:
        return f"{title}Not compared on test tasks: {error}."
    drawn = tables.figures(sweep.folder, arms, found, base.name, unit)
    pictures = "\n".join(f"![{path.stem}]({path.name})" for path in drawn)
    if apart := [arm.name for arm in arms[1:] if arm not in others]:
        pictures += f"\n\nTested on other tasks, so not compared: {', '.join(apart)}."
    pictures += "".join(left_out)
    more = f", the best {COMPARED} settings" if len(order) > COMPARED else ""
    return (
        f"{title}On test tasks{more}; the others are compared with the first."
        f"\n\n{tables.means_table(arms, unit)}\n\n"
        f"{tables.differences_table(found, base.name, unit)}\n{pictures}"
    )


def _failures(trials: list[Trial]) -> str:
    last = latest(trials)
    lines = [f"- trial {t.number}: {t.reason} (`{t.log}`)" for t in last if t.state == FAILED]
    lines += [f"- trial {t.number}: lost, to be continued" for t in last if t.state == LOST]
    return "## What failed\n\n" + "\n".join(lines) if lines else ""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5)
