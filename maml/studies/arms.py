"""What is compared: a learner's runs of all seeds, with the score of each test task."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datasets.spelling import is_theirs
from datasets.words import counted
from maml.config import Config, registry
from maml.errors import UserError
from maml.evaluation.scores import headline
from maml.run import directory, reading
from maml.run.reading import Run
from maml.run.task_scores import NAME
from maml.studies.statistics import Floats
from maml.studies.sweeping.points import STUDY, Point, read_study, value_of

TASKS = (
    "data", "omniglot_split", "image_size", "image_mode", "split_fractions", "ways", "shots",
    "eval_queries", "batch_size", "horizon",
)  # fmt: skip
"""Of these the test tasks depend, beside the seed."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        name: What it is called.
        first: One of its runs; the others differ in their seed alone.
        metric: What its scores are: a column asked for, or accuracy, return or loss.
        scores: By seed, each task's score, by its index.
    """

    name: str
    first: Run
    metric: str
    scores: dict[int, dict[int, float]]


def read(asked: str, metric: str | None) -> Arm:
    """Return what ``PATH`` or ``PATH:name=value,…`` names.

    ``PATH`` is a run directory, a record, or a folder of runs, as a sweep's is; of those, the runs
    that have the values: by their configuration, or by the sweep's own parameters.

    Args:
        asked: As on the command line.
        metric: A column of test_tasks.csv; None: the accuracy (of policies the return, of
            regressions the loss) of the run's headline.

    Raises:
        UserError: naming it, and what is wrong.
    """
    path, values = _split(asked)
    if not path.is_dir():
        raise UserError(f"{asked}: {path} is no folder")
    points = points_of(path)
    if points and not any((run_dir / "config.yaml").is_file() for run_dir in points):
        n = counted(len(points), "trial")
        raise UserError(f"{asked}: no run: {n}, and none began to train (see {path / 'logs'})")
    found = reading.find([path])
    runs = [run for run in found if _has(run.config, values, asked, points.get(run.path, {}))]
    if not runs:
        raise UserError(f"{asked}: no run in {path} has these values")
    tested = [run for run in runs if (run.path / NAME).is_file()]
    gone_on = [run for run in tested if _has_gone_on(run.path)]
    if gone_on:
        left = ", ".join(str(run.path) for run in gone_on[:3]) + (", …" if gone_on[3:] else "")
        line = f"{asked}: went on after the test, and did not come to a new one: {left}"
        if len(gone_on) == len(tested):
            raise UserError(line)
        print(f"left out of {line}", file=sys.stderr)
    return arm_of(asked, [run for run in tested if run not in gone_on], metric)


def _has_gone_on(run_dir: Path) -> bool:
    """Say whether a run is trained further since its test, which is of an earlier model then."""
    status = directory.read_status(run_dir)
    return status is not None and status["state"] != "finished"


def points_of(folder: Path) -> dict[Path, Point]:
    """Return the values of a sweep's parameters by run directory; none if it is no sweep's folder.

    Raises:
        UserError: if it is one, and cannot be read.
    """
    if (folder / STUDY).is_file():
        return {folder / trial["run"]: trial["point"] for trial in read_study(folder)["trials"]}
    if (folder / "journal.log").is_file():
        # Imported here: most comparisons are of no sweep, and need no Optuna.
        from maml.studies.sweeping.sweep import kept

        return {trial.run_dir: trial.point for trial in kept(folder).trials()}
    return {}


def arm_of(name: str, runs: list[Run], metric: str | None = None) -> Arm:
    """Return the arm of runs that differ in their seed alone.

    Raises:
        UserError: naming ``name`` and what is wrong with them.
    """
    if not runs:
        raise UserError(f"{name}: none of its runs has {NAME}: none has come to its test")
    if differing := reading.differing(runs):
        values = sorted({str(getattr(run.config, differing[0])) for run in runs})
        raise UserError(
            f"{name}: its runs differ in {', '.join(differing)}: name one, as in "
            f"{name.partition(':')[0]}:{differing[0]}={values[0]}"
        )
    scores: dict[int, dict[int, float]] = {}
    scored_by = ""
    for run in runs:
        if other := other_tasks(runs[0], run):
            raise UserError(f"{name}: its runs were not all tested on the same tasks: {other}")
        columns = next(iter(run.scores.values()), {})
        scored_by = metric or headline(columns)
        column = metric or run.headline + scored_by
        for (split, seed, index), row in run.scores.items():
            if split != "test":
                continue
            if column not in row:
                raise UserError(f"{run.path / NAME}: no {column}; it has {', '.join(columns)}")
            if not np.isfinite(row[column]):
                raise UserError(f"{run.path / NAME}: {column} of task {index} is {row[column]}")
            if index in scores.setdefault(seed, {}):
                raise UserError(f"{name}: two runs have seed {seed}; {run.path} is one of them")
            scores[seed][index] = row[column]
    return Arm(name, runs[0], scored_by, scores)


def other_tasks(a: Run, b: Run) -> str:
    """Say by what the test tasks of two runs differ, but for their seeds; "" where by nothing."""
    for name in TASKS:
        of_a, of_b = getattr(a.config, name), getattr(b.config, name)
        if of_a != of_b:
            return f"{name} is {of_a} for the first and {of_b} for the second"
    if not (is_theirs(a.config.data) or registry.data_set(a.config.data).own_images):
        return ""
    # A folder of a user's own images that has only moved is the same one.
    images = [run.result.get("test_images") for run in (a, b)]
    of_a, of_b = a.config.data_root, b.config.data_root
    if images[0] == images[1] if None not in images else of_a == of_b:
        return ""
    where = f"data_root is {of_a} for the first and {of_b} for the second"
    return where if None in images else f"{where}, and their images differ"


def paired(a: Arm, b: Arm) -> tuple[Floats, Floats, list[int]]:
    """Return both arms' scores ``[S, T]`` on the tasks that both were tested on, and the seeds.

    Raises:
        UserError: naming both, where they have no task in common.
    """
    if other := other_tasks(a.first, b.first):
        raise UserError(f"{a.name} and {b.name} were not tested on the same tasks: {other}")
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
    return first, second, seeds


def _split(asked: str) -> tuple[Path, dict[str, str]]:
    """Return the path of ``PATH:name=value,…``, and the values; one may have commas and colons."""
    path, text = asked, ""
    if found := re.fullmatch(r"(.*?):([\w-]+=.*)", asked):
        path, text = found.groups()
    parts = (part.partition("=") for part in _parts(text))
    values = {name.lstrip("-").replace("-", "_"): value for name, _, value in parts}
    return Path(path).expanduser(), values


def _parts(text: str) -> list[str]:
    """Return each ``name=value`` of a list; those between brackets are a component's arguments."""
    parts, between = [""], ""
    for i, piece in enumerate(re.split(r"([,\s]+)(?=[\w-]+=)", text)):
        quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", parts[-1])
        if i % 2:
            between = piece
        elif quoted.count("(") > quoted.count(")"):
            parts[-1] += between + piece
        else:
            parts.append(piece)
    return [part for part in parts if part]


def _has(config: Config, values: dict[str, str], asked: str, point: Point) -> bool:
    for name, value in values.items():
        if name not in point and not hasattr(config, name):
            raise UserError(f"{asked}: no run has a value named {name}")
        has = point[name] if name in point else getattr(config, name)
        if str(has) != value and has != value_of(value):
            return False
    return True
