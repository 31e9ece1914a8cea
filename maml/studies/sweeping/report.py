"""``report.md`` of a sweep: every setting, what each parameter does, which differences hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean, stdev

from maml.errors import UserError
from maml.plots import style
from maml.run.files import write_text
from maml.run.reading import read
from maml.run.task_scores import NAME
from maml.studies import pictures, tables
from maml.studies.arms import Arm, arm_of, other_tasks
from maml.studies.markdown import grid
from maml.studies.sweeping.sweep import FAILED, LOST, STOPPED, Sweep, Trial, counts

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
    ended = [trial for trial in sweep.trials() if trial.value is not None]
    if not ended:
        raise UserError(f"--report: no trial in {sweep.folder} has a metric yet")
    settings = sweep.settings(ended)
    upwards = sweep.file.goal == "maximize"
    order = sorted(settings, key=lambda name: fmean(_values(settings[name])), reverse=upwards)
    if against is not None and against not in order:
        raise UserError(f"--against {against}: no such setting; there are {', '.join(order)}")
    settings = {name: settings[name] for name in order}
    first = [against] if against else []
    parts = [
        _head(sweep),
        _settings(sweep.file.metric, settings),
        _effects(sweep, ended),
        _differences(sweep.folder, {name: settings[name] for name in (*first, *order)}),
        _failures(sweep),
    ]
    path = sweep.folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _values(trials: list[Trial]) -> list[float]:
    return [trial.value for trial in trials if trial.value is not None]


def _head(sweep: Sweep) -> str:
    states = ", ".join(f"{n} {state}" for state, n in counts(sweep.trials()).items())
    said, metric = sweep.file.said.get("description"), sweep.file.metric
    text = (
        f"# Sweep {sweep.name}\n\n{f'{said}. ' if said else ''}`{sweep.file.path}`, method "
        f"{sweep.file.method}; trials: {states}. Ranked by {metric} ({sweep.file.goal}), the last "
        "value of each run, or with `--test-model best` that of the model that is tested"
    )
    if metric.startswith("test/"):
        text += (
            ". **These are test tasks: what is best here was chosen on them, and is better here "
            "than on others**"
        )
    return text + "."


def _settings(metric: str, settings: dict[str, list[Trial]]) -> str:
    unit, rows = tables.Unit(metric), []
    for name, trials in settings.items():
        values = _values(trials)
        spread = unit.plain(stdev(values)) if len(values) > 1 else "–"
        stopped = sum(trial.state == STOPPED for trial in trials)
        rows.append(
            [name, unit.plain(fmean(values)), spread, str(len(values)), str(stopped or "–")]
        )
    shown = grid(["setting", metric, "spread", "trials", "stopped early"], rows)
    return f"## Settings\n\n{shown}\n\nThe spread is the standard deviation over seeds."


def _effects(sweep: Sweep, ended: list[Trial]) -> str:
    names = [name for name in sweep.file.varied if name != "seed"]
    if not names:
        return ""
    points = [trial.point for trial in ended]
    drawn = pictures.main_effects(points, _values(ended), names, sweep.file.metric)
    style.save(drawn, sweep.folder / "effects")
    return "## Main effects\n\n![main effects](effects.png)"


def _differences(folder: Path, settings: dict[str, list[Trial]]) -> str:
    """Compare settings with the first, on test tasks; "" where they were tested on none."""
    arms: list[Arm] = []
    left_out: list[str] = []
    for name, trials in itertools.islice(settings.items(), COMPARED):
        tested = [read(trial.run_dir) for trial in trials if (trial.run_dir / NAME).is_file()]
        try:
            arms += [arm_of(name, tested)] if tested else []
        except UserError as error:  # a test whose losses are no numbers, say
            left_out.append(f"{name} is not compared: {error}.")
    # Of a sweep over shots, say, only those with as many are tested on the same tasks.
    apart = [arm.name for arm in arms if other_tasks(arms[0].first, arm.first)]
    if apart:
        left_out.append(f"Tested on other tasks, so not compared: {', '.join(apart)}.")
    alike = [arm for arm in arms if arm.name not in apart]
    try:
        said = "".join(tables.compared(alike, folder)) if len(arms) > 1 else ""
    except UserError as error:
        said = f"Not compared on test tasks: {error}."
    if not said and not left_out:
        return ""
    more = f" The best {COMPARED} settings." if len(settings) > COMPARED else ""
    head = f"## Which differences hold\n\nOn test tasks, from the first.{more}"
    return "\n\n".join(part for part in (head, said, *left_out) if part)


def _failures(sweep: Sweep) -> str:
    trials = sweep.trials()
    lines = [f"- trial {t.number}: {t.reason} (`{t.log}`)" for t in trials if t.state == FAILED]
    lines += [f"- trial {t.number}: lost, to be continued" for t in trials if t.state == LOST]
    return "## What failed\n\n" + "\n".join(lines) if lines else ""
