"""The sides of a comparison: a learner's runs of all seeds, with each test task's score."""

import contextlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maml.config import Config, registry
from maml.errors import UserError
from maml.evaluation.intervals import Floats
from maml.run import directory, reading
from maml.run.files import TESTED, headline
from maml.run.reading import Run

TASKS = (
    "data", "omniglot_split", "image_size", "image_mode", "split_fractions", "ways", "shots",
    "eval_queries", "batch_size", "horizon",
)  # fmt: skip
"""The fields that determine the test tasks, in addition to the seed."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    name: str
    first: Run
    """The first run; the others differ only in their seed."""
    metric: str
    """The requested column, or else accuracy, return or loss."""
    scores: dict[int, dict[int, float]]
    """Maps each seed to its tasks' scores, by task index."""


def read(asked: str, metric: str | None) -> Arm:
    """Return the arm that ``PATH`` or ``PATH:name=value,…`` names.

    ``PATH`` is a run directory, a record, or a folder of runs, such as a sweep's. The values choose
    runs by their configuration or by the sweep's parameters. ``metric`` is a column of
    test_tasks.csv. None means the run's headline metric: the accuracy, for policies the return,
    for regressions the loss.
    """
    path, text = _split(asked)
    points: dict[Path, dict[str, Any]] = {}
    if (path / "journal.log").is_file():
        # Imported here, because most comparisons involve no sweep and need no Optuna.
        from maml.studies.sweeping import sweep

        for run_dir, point in sweep.points_in(path).items():
            points[run_dir] = {_field(name): value for name, value in point.items()}
    there = reading.find([path])
    values = _values(text, {*vars(there[0].config), *(n for of in points.values() for n in of)})
    runs = [run for run in there if _has(run.config, values, asked, points.get(run.path, {}))]
    if not runs:
        read_as = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise UserError(f"{asked}: no run in {path} has these values: {read_as}")
    tested = [run for run in runs if (run.path / TESTED).is_file()]
    for run in runs if tested else ():
        if run not in tested:
            print(f"left out: {run.path}: it was not tested", file=sys.stderr, flush=True)
    for run in tested:
        # A run that trained on after its test has the scores of an earlier model.
        status = directory.read_status(run.path)
        if status is not None and status["state"] != "finished":
            raise UserError(f"{run.path}: went on after the test, and was not tested again")
    return arm_of(asked, tested, metric)


def arm_of(name: str, runs: list[Run], metric: str | None = None) -> Arm:
    """Return the arm of runs that differ only in their seed."""
    if not runs:
        raise UserError(f"{name}: none of its runs has {TESTED}: no run has been tested")
    if differing := reading.differing(runs):
        values = sorted({str(getattr(run.config, differing[0])) for run in runs})
        raise UserError(
            f"{name}: its runs differ in {', '.join(differing)}: name one, as in "
            f"{name}{',' if ':' in name else ':'}{differing[0]}={values[0]}"
        )
    scores: dict[int, dict[int, float]] = {}
    scored_by = ""
    for run in runs:
        if other := other_tasks(runs[0], run):
            raise UserError(f"{name}: its runs were not all tested on the same tasks: {other}")
        if not run.scores:
            raise UserError(f"{run.path / TESTED}: it has no rows")
        columns = next(iter(run.scores.values()))
        scored_by = metric or headline(columns)
        column = metric or run.headline + scored_by
        for (split, seed, index), row in run.scores.items():
            if split != "test":
                continue
            if column not in row:
                raise UserError(f"{run.path / TESTED}: no {column}; it has {', '.join(columns)}")
            if not np.isfinite(row[column]):
                raise UserError(f"{run.path / TESTED}: {column} of task {index} is {row[column]}")
            if index in scores.setdefault(seed, {}):
                raise UserError(f"{name}: two runs have seed {seed}; {run.path} is one of them")
            scores[seed][index] = row[column]
    return Arm(name, runs[0], scored_by, scores)


def other_tasks(a: Run, b: Run) -> str:
    """Describe how the test tasks of two runs differ, apart from the seeds; "" if they do not."""
    for name in TASKS:
        of_a, of_b = getattr(a.config, name), getattr(b.config, name)
        if of_a != of_b:
            return f"{name} is {of_a} for the first and {of_b} for the second"
    # A user's own learner is not imported, so its kind of tasks is not known.
    known, learners = registry.known("learner"), (a.config.learner, b.config.learner)
    kinds = [known[name].tasks for name in learners if name in known]
    if len(set(kinds)) > 1:
        return f"they are {kinds[0]} for the first and {kinds[1]} for the second"
    # A digest of a user's own images, which stays the same if their folder only moves.
    images = [run.result.get("test_images") for run in (a, b)]
    return "" if images[0] == images[1] else "their images differ"


def paired(a: Arm, b: Arm) -> tuple[Floats, Floats]:
    """Return both arms' scores ``[S, T]``, for the seeds and tasks that both arms share."""
    if other := other_tasks(a.first, b.first):
        raise UserError(f"{a.name} and {b.name} were not tested on the same tasks: {other}")
    if a.metric != b.metric:
        raise UserError(
            f"{a.name} is scored by {a.metric} and {b.name} by {b.metric}: give --metric, a column "
            "that both have"
        )
    seeds = sorted(a.scores.keys() & b.scores.keys())
    if not seeds:
        raise UserError(
            f"{a.name} and {b.name} have no seed in common, so no task: {sorted(a.scores)} and "
            f"{sorted(b.scores)}"
        )
    common = set.intersection(*(set(arm.scores[seed]) for arm in (a, b) for seed in seeds))
    if len(common) < 2:
        raise UserError(f"{a.name} and {b.name} have fewer than two test tasks in common")
    first, second = (
        np.array([[arm.scores[seed][task] for task in sorted(common)] for seed in seeds])
        for arm in (a, b)
    )
    return first, second


def _split(asked: str) -> tuple[Path, str]:
    """Return the path of ``PATH:name=value,…``, and the text of the values."""
    path, text = os.path.expanduser(asked), ""
    if (parts := re.fullmatch(r"(.*?):([\w-]+=.*)", path)) and not Path(path).is_dir():
        path, text = parts.groups()
    return Path(path), text


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _values(text: str, known: set[str]) -> dict[str, str]:
    """Return the values of ``name=value,…`` by name; all names but the first are ``known``."""
    parts: list[str] = []
    # A value may have commas, as in adapt=*,@norm=0. Between brackets are a component's arguments.
    for gap, piece in re.findall(r"([,\s]*)([^,\s]+)", text):
        name, equals, _ = piece.partition("=")
        is_next = equals and _field(name) in known
        if parts and (not is_next or parts[-1].count("(") > parts[-1].count(")")):
            parts[-1] += gap + piece
        else:
            parts.append(piece)
    each = (part.partition("=") for part in parts)
    return {_field(name): value for name, _, value in each}


def _has(config: Config, values: dict[str, str], asked: str, point: dict[str, Any]) -> bool:
    for name, value in values.items():
        # YAML reads 1e-1 as text. A sweep's point has the text, and the configuration 0.1.
        there = [of[name] for of in (vars(config), point) if name in of]
        if not there:
            raise UserError(f"{asked}: no run has a value named {name}")
        same = value.lower() in (str(each).lower() for each in there)  # true matches True
        with contextlib.suppress(ValueError):
            same = same or float(value) in there  # 1e-1 matches 0.1
        if not same:
            return False
    return True
