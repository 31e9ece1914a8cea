"""Write a sweep's ``report.md``: all settings, each parameter's effect, which differences hold."""

import contextlib
import textwrap
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from optuna.distributions import CategoricalDistribution

from maml.errors import UserError
from maml.plots import heat, style
from maml.plots.style import BLUE
from maml.run.files import TESTED, write_text
from maml.run.reading import read
from maml.studies import compare, files, grid
from maml.studies.arms import arm_of, other_tasks
from maml.studies.sweeping.file import setting_of
from maml.studies.sweeping.sweep import FAILED, Sweep, Trial

COMPARED = 12
"""At most this many of the best settings are compared."""


def write(sweep: Sweep) -> Path:
    """Write the report of the trials that have a metric, with figures; return its path."""
    ended = [trial for trial in sweep.trials() if trial.record.value is not None]
    if not ended:
        raise UserError(f"--report: no trial in {sweep.folder} has a metric yet")
    of_setting: dict[str, list[Trial]] = {}
    names = [name for name in sweep.file.varied if name != "seed"]
    for trial in ended:
        of_setting.setdefault(setting_of(trial.record.params, names), []).append(trial)
    upwards = sweep.file.goal == "maximize"
    order = sorted(of_setting, key=lambda name: fmean(_values(of_setting[name])), reverse=upwards)
    settings = {name: of_setting[name] for name in order}
    parts = [
        _head(sweep),
        _settings(sweep, names, settings),
        _slices(sweep, names, ended),
        _pairs(sweep, names, settings),
        _differences(sweep.folder, settings),
        _failures(sweep),
    ]
    path = sweep.folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _values(trials: list[Trial]) -> list[float]:
    return [t.record.value for t in trials if t.record.value is not None]


def _head(sweep: Sweep) -> str:
    said, metric = sweep.file.said.get("description"), sweep.file.metric
    text = (
        f"# Sweep {sweep.study.study_name}\n\n{f'{said}. ' if said else ''}`{sweep.file.path}`, "
        f"method {sweep.file.method}; trials: {sweep.progress(None)}. Ranked by {metric} "
        f"({sweep.file.goal}), the last value of each run, or with `--test-model best` that of the "
        "model that is tested"
    )
    if metric.startswith("test/"):
        text += (
            ". **These are test tasks: what is best here was chosen on them, and is better here "
            "than on others**"
        )
    return text + "."


def _settings(sweep: Sweep, names: list[str], settings: dict[str, list[Trial]]) -> str:
    rows, metric = list[list[str]](), sweep.file.metric
    columns = {name: list[Any]() for name in (*names, metric, "spread", "trials", "test steps")}
    for name, trials in settings.items():
        values = _values(trials)
        mean, spread = fmean(values), stdev(values) if len(values) > 1 else None
        steps = "–"
        with contextlib.suppress(UserError):  # another program may write no config.yaml
            steps = compare.test_steps(read(trials[0].run_dir))
        shown = "–" if spread is None else compare.plain(spread, metric)
        rows.append([name, compare.plain(mean, metric), shown, str(len(values)), steps])
        point = trials[0].record.params
        numbers = [*(point[name] for name in names), mean, spread, len(values), steps]
        for column, number in zip(columns.values(), numbers, strict=True):
            column.append(number)
    header = ["setting", metric, "spread", "trials", "test steps"]
    files.write(sweep.folder / "settings", header, rows, columns)
    return (
        f"## Settings\n\n{grid(header, rows)}\n\nThe spread is the standard deviation over seeds. "
        "Test steps: `eval_inner_steps`, the inner steps at validation and test. For papers: "
        "[settings.csv](settings.csv), [settings.tex](settings.tex)."
    )


def _slices(sweep: Sweep, names: list[str], trials: list[Trial]) -> str:
    """Draw every trial's metric against each parameter."""
    if not names:
        return ""
    metric, rows = sweep.file.metric, -(-len(names) // 4)
    drawn, axes = style.figure(rows, min(len(names), 4), (3.2, 3.2), sharey=True)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        space, x = sweep.file.space[name], [trial.record.params[name] for trial in trials]
        if isinstance(space, CategoricalDistribution):
            x = [space.choices.index(value) for value in x]
            shown = [textwrap.fill(str(choice), 16) for choice in space.choices]
            axis.set_xticks(range(len(shown)), shown, rotation=30, ha="right", fontsize=8)
            axis.margins(x=0.2)
        elif getattr(space, "log", False):
            axis.set_xscale("log")
        axis.plot(x, _values(trials), "o", color=BLUE, alpha=0.5)
        style.finish(axis, name, metric * (axis in axes[:, 0]), metric=metric)
    style.save(drawn, sweep.folder / "effects")
    return "## Parameters\n\n![each trial by each parameter](effects.png)"


def _pairs(sweep: Sweep, names: list[str], settings: dict[str, list[Trial]]) -> str:
    """Draw the mean of each pair of values, if a grid has two parameters besides the seed."""
    if len(names) != 2 or sweep.file.method != "grid":
        return ""
    x, y = names
    means = {}
    for trials in settings.values():
        point = trials[0].record.params
        means[point[x], point[y]] = fmean(_values(trials))
    axes = [sweep.file.values[name] or () for name in names]
    heat.draw(sweep.folder / "grid", (x, y), (axes[0], axes[1]), means, sweep.file.metric)
    return f"![{sweep.file.metric} of each pair of {x} and {y}](grid.png)"


def _differences(folder: Path, settings: dict[str, list[Trial]]) -> str:
    """Compare settings with the best on test tasks; "" if they have no test tasks in common."""
    runs = {
        name: [read(trial.run_dir) for trial in trials if (trial.run_dir / TESTED).is_file()]
        for name, trials in [*settings.items()][:COMPARED]
    }
    try:
        arms = [arm_of(name, tested) for name, tested in runs.items() if tested]
        # In a sweep over shots, for example, only settings with equal shots share test tasks.
        alike = [arm for arm in arms if not other_tasks(arms[0].first, arm.first)]
        said = "".join(compare.compared(alike, folder)) if len(alike) > 1 else ""
    except UserError as error:  # for example, a test loss is NaN
        said = f"Not compared on test tasks: {error}."
    if not said:
        return ""
    head = f"The best {COMPARED} settings at most, as far as they have the test tasks of the first."
    return f"## Which differences hold\n\n{head}\n\n{said}"


def _failures(sweep: Sweep) -> str:
    lines = [
        f"- trial {t.record.number}: {t.record.user_attrs['reason']} (`{t.log}`)"
        for t in sweep.trials()
        if t.state == FAILED
    ]
    return "## What failed\n\n" + "\n".join(lines) if lines else ""
