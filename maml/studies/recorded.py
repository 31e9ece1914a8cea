"""A record: what is kept of a run whose number stands in a table.

``launch/records/<preset>/seed-<n>/`` holds ``config.yaml``, ``result.json``, ``test_tasks.csv``,
``metrics.jsonl`` (thinned) and ``curves.png``, as a run directory does, and beside these
``record.json`` (how it was made) and ``model.pt`` (the parameters, where they are below 1 MB).

Of an experiment that is not the preset's the first folder is ``<preset>+<field>=<value>+…``. It
ends with a digest where that alone tells experiments apart: of a value that no file can be named
by, of a user's own images or components.

A run that was stopped before its last iteration has neither ``test_tasks.csv`` nor ``model.pt``,
but ``checkpoint.pt`` (where that is below 4 MB), from which any machine can go on: ``--resume``.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch

from maml.config import Config, saved
from maml.config.presets import changed
from maml.errors import UserError
from maml.params import Params
from maml.run.checkpoint import load_parameters
from maml.run.files import read_object
from maml.run.provenance import digest_of
from maml.run.task_scores import NAME, read_tasks
from maml.scores import means, with_headline
from maml.studies import REPOSITORY

RECORDS = REPOSITORY / "launch" / "records"
MOST_BYTES = {"model.pt": 1_000_000, "checkpoint.pt": 4_000_000}
"""A larger file is not kept."""
LONGEST = 150
"""Letters of a folder's name; most file systems take 255 bytes."""


def place_of(config: Config, own: str = "") -> Path:
    """Return a run's place below all records: a folder for each experiment and seed.

    Args:
        config: Of the run.
        own: A digest of the user's own images and components, if there are some.
    """
    other = [f"+{name}={value}" for name, value in changed(config).items()]
    whole = "".join([config.preset, *other])
    name = re.sub(r"[^\w.+=-]+", "_", whole)
    if name != whole or len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return Path(f"{name}-{own}" if own else name, f"seed-{config.seed}")


class Record(NamedTuple):
    """One run's record; ``result`` and ``made`` are the contents of its two JSON files."""

    folder: Path
    config: Config
    result: dict[str, Any]
    made: dict[str, Any]

    @property
    def changed(self) -> dict[str, Any]:
        """Return what makes it another experiment of its preset, as that is now.

        A preset that was mended since is no longer what an earlier record is of.
        """
        return changed(self.config)

    @property
    def left(self) -> int:
        """Return how many iterations are left; 0 of a run that has finished."""
        return int(self.result.get("iterations_left", 0))

    @property
    def model(self) -> Path:
        """Return where its parameters are; not there if they are too large to be kept."""
        return self.folder / "model.pt"


def read(folder: Path) -> Record:
    """Return the record in ``folder``; `other_means` looks whether its numbers are right.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    content = {name: read_object(folder / name) for name in _SHAPES}
    for name, shape in _SHAPES.items():
        if wrong := misfit(content[name], shape):
            raise UserError(f"{folder / name}: damaged: its {wrong}")
    config = saved.read(folder / "config.yaml")
    if re.fullmatch(r"seed-\d+", folder.name) and folder.name != f"seed-{config.seed}":
        raise UserError(f"{folder}: damaged: its run has the seed {config.seed}")
    return Record(folder, config, content["result.json"], content["record.json"])


def misfit(said: Any, shape: Any, name: str = "") -> str:
    """Return the first entry of ``said`` that is of another kind than ``shape``; "": there is none.

    Args:
        said: What a file holds.
        shape: Its type, or several; or a dict of what an object holds, where one whose name ends in
            "?" may be missing; or a list of the shape of each of its elements, at least one.
        name: What ``said`` is called.
    """
    if isinstance(shape, dict) and isinstance(said, dict):
        there = {key: key.removesuffix("?") for key in shape}
        inner = [
            misfit(said.get(key), shape[of], f"{name}.{key}".lstrip("."))
            for of, key in there.items()
            if of == key or key in said
        ]
    elif isinstance(shape, list) and isinstance(said, list) and said:
        inner = [misfit(each, shape[0], f"{name}[{i}]") for i, each in enumerate(said)]
    elif isinstance(shape, (dict, list)) or not isinstance(said, shape):
        return f"{name} is {said!r}"
    else:
        return ""
    return next(filter(None, inner), "")


_NUMBER = (int, float)
START = {
    "time": str, "iteration": int, "git_commit": (str, NoneType), "processes?": int,
    "threads?": (int, NoneType), "machine?": {"processor": str}, "own_files?": dict,
}  # fmt: skip
"""What a start says, in a run directory, too, where the commit may not be known."""
_SHAPES = {
    "record.json": {
        "starts": [START], "minutes": _NUMBER, "note": str,
        "hardware": {"date": str, "processor": str},
    },
    "result.json": {
        "tasks": int, "transductive": bool, "iterations": int, "iterations_left?": int,
        "iterations_per_second?": (*_NUMBER, NoneType), "diverged?": (dict, NoneType),
        "skipped?": int, "ensemble?": list, "ensemble_accuracy?": _NUMBER,
        "ensemble_ci95?": _NUMBER, "ensemble_non_transductive_accuracy?": _NUMBER,
        "ensemble_non_transductive_accuracy_ci95?": _NUMBER,
    },
}  # fmt: skip
"""What a record's files hold."""

EXACT = 1e-9
"""Between means of the same numbers, added up in another order."""


def other_means(folder: Path, result: dict[str, Any], config: Config) -> str:
    """Return which number of a ``result.json`` is not that over its tasks; "": each is.

    Args:
        folder: The run directory, or record, where the tasks' scores are.
        result: The content of the file.
        config: Of the run.

    Raises:
        UserError: if the scores cannot be read.
    """
    kept, count = read_tasks(folder / NAME), result.get("tasks")
    if not isinstance(count, int) or count < 1:
        return f"its tasks is {count}"
    rows = [kept.get(("test", config.seed, index)) for index in range(count)]
    there = [row for row in rows if row is not None]
    if len(there) < count:
        return f"it is over {count} tasks; {len(there)} of these are in {NAME}"
    names = list(there[0])
    values = torch.tensor([[row[name] for name in names] for row in there], dtype=torch.float64)
    expected = with_headline(means(values, "test", names), transductive=config.transductive)
    if config.epochs is None:
        expected["iterations"] = config.iterations
    for name, value in expected.items():
        said = result.get(name)
        if isinstance(said, _NUMBER) and isinstance(value, _NUMBER):
            same = alike(said, value, EXACT)
        else:
            same = said == value
        if not same:
            return f"its {name} is {said!r}, and {value} over the tasks"
    return ""


def alike(one: float, other: float, tolerance: float) -> bool:
    """Say whether two numbers are as good as equal; two that are no numbers are."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(1.0, abs(other))


def find(folder: Path) -> list[Record]:
    """Return the records in ``folder``: itself one, those of a preset's seeds, or of all presets.

    Raises:
        UserError: as `read`; or if a number is not that over the record's tasks, or two records are
            of the same experiment and seed.
    """
    found: dict[str, Record] = {}
    for record in map(read, folders(folder)):
        wrong = "" if record.left else other_means(record.folder, record.result, record.config)
        if wrong:
            raise UserError(f"{record.folder / 'result.json'}: damaged: {wrong}")
        place = str(place_of(record.config, record.made.get("own", "")))
        if place in found:
            raise UserError(
                f"{record.folder}: it is of the same experiment and seed as {found[place].folder}"
            )
        found[place] = record
    return list(found.values())


def folders(folder: Path) -> list[Path]:
    """Return where the records in ``folder`` are; one of which a file is missing, too."""
    return sorted(
        {
            path.parent
            for name in _SHAPES
            for path in folder.glob(f"**/{name}")
            if name == "record.json" or path.parent.name.startswith("seed-")
        }
    )


def parameters(record: Record) -> Params:
    """Return the parameters that are kept.

    Raises:
        UserError: naming the file, if it is not there, or not the one that was recorded.
    """
    wrong = other_file(record, "model.pt")
    if wrong or not record.model.is_file():
        raise UserError(wrong or f"{record.model}: no parameters are kept")
    return load_parameters(record.model)


def other_file(record: Record, name: str) -> str:
    """Return what is wrong with ``model.pt`` or ``checkpoint.pt``; "": it is as it was recorded.

    One that was too large to be kept is not there.
    """
    path, kind = record.folder / name, name.removesuffix(".pt")
    try:
        digest = digest_of(path)
    except OSError as error:
        size = record.made.get(f"{kind}_bytes", 0)
        return "" if size > MOST_BYTES[name] else f"{path}: {error.strerror}: it was recorded"
    if digest != record.made.get(f"{kind}_sha256"):
        return f"{path}: not the file that was recorded: its digest differs"
    return ""
