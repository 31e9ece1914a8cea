"""Read the files of runs, and group runs that differ only in their seed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maml.config.fields import Config, settings
from maml.errors import UserError
from maml.run import directory
from maml.run.files import (
    RECORD,
    RESULT,
    TESTED,
    Scores,
    read_json,
    read_object,
    read_rows,
    read_tasks,
)
from maml.run.log import Row, step_and_values


@dataclass(frozen=True)
class Run:
    """A run directory or a record. Files other than config.yaml are read on first access."""

    path: Path
    config: Config

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl."""
        return read_rows(self.path / "metrics.jsonl")

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json; empty if it cannot be read."""
        return read_json(self.path / "result.json", RESULT)

    @cached_property
    def made(self) -> dict[str, Any]:
        """The content of a record's record.json: how it was made."""
        return read_object(self.path / "record.json", RECORD)

    @cached_property
    def scores(self) -> Scores:
        """The scores of each test task, from test_tasks.csv."""
        return read_tasks(self.path / TESTED)

    @property
    def headline(self) -> str:
        """The prefix of the metrics' names that the run's headline uses."""
        return "" if self.config.transductive else "non_transductive_"


def history(rows: Sequence[Row], metric: str) -> dict[int, float]:
    """Return a metric by iteration, the oldest first; keep inf and nan.

    ``metric`` is its name for loggers: ``validation/accuracy``, ``validation/after/1``.
    """
    steps = map(step_and_values, rows)
    return {iteration: values[metric] for iteration, values in steps if metric in values}


def read(path: Path) -> Run:
    """Return the run in a directory; a UserError names its config.yaml, if that is damaged."""
    return Run(path, directory.read_config(path))


def find(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in all ``paths``: a run itself, or the runs in a folder or its ``trials``."""
    runs = []
    for path in paths:
        inside = [path] if (path / "config.yaml").is_file() else []
        inside = inside or sorted(each.parent for each in path.glob("*/config.yaml"))
        inside = inside or sorted(each.parent for each in path.glob("trials/*/config.yaml"))
        if not inside:
            raise UserError(f"{path}: no run directory, and none in it")
        runs += [read(each) for each in inside]
    return runs


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings, except the seed, in which the runs differ.

    Initial weights are one setting if each seed has its own, and their paths differ in numbers
    alone, as after a pre-training of each seed.
    """
    names = dict.fromkeys(name for run in runs for name in settings(run.config) if name != "seed")
    return [name for name in names if len({_setting(run, name, runs) for run in runs}) > 1]


def _setting(run: Run, name: str, runs: Sequence[Run]) -> Any:
    value = getattr(run.config, name)
    if name != "init" or value is None:
        return value
    form = _without_numbers(value)
    begun = [(each.config.init, each.config.seed) for each in runs if each.config.init is not None]
    pairs = {(init, seed) for init, seed in begun if _without_numbers(init) == form}
    each_has_one = len(pairs) == len({init for init, _ in pairs}) == len({s for _, s in pairs})
    return form if each_has_one and len(pairs) > 1 else value


def _without_numbers(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def methods(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs that differ only in their seed, by a label that distinguishes the groups."""
    names = differing(runs)
    # Presets differ in many settings. The learner or the preset is a shorter label, if unique.
    for alone in ("learner", "preset"):
        value = {tuple(_setting(r, n, runs) for n in names): getattr(r.config, alone) for r in runs}
        if len(names) > 1 and len(set(value.values())) == len(value):
            names = [alone]
            break
    if not names:
        first = runs[0].config
        return {first.preset or first.learner: list(runs)}
    of_label: dict[str, list[Run]] = {}
    for run in runs:
        said = {name: str(_setting(run, name, runs)) for name in names}
        label = " ".join(f"{name}={value}" for name, value in said.items())
        if names in (["learner"], ["preset"]):
            label = said[names[0]]
        of_label.setdefault(label, []).append(run)
    return of_label
