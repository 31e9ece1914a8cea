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

import csv
import hashlib
import math
import re
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from maml.config import Config, saved
from maml.config.presets import changed
from maml.errors import UserError
from maml.params import Params
from maml.run.checkpoint import load_parameters
from maml.run.files import read_object
from maml.run.provenance import digest_of
from maml.run.task_scores import ADDRESS, NAME

RECORDS = Path(__file__).resolve().parent / "records"
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
    """Return the record in ``folder``.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    made = read_object(folder / "record.json")
    result = read_object(folder / "result.json")
    content = {"record.json": made, "result.json": _UNSAID | result}
    for name, kinds in _KINDS.items():
        wrong = misfit(content[name], kinds)
        if wrong:
            raise UserError(f"{folder / name}: damaged: its {wrong}")
    wrong = wrong_starts(made["starts"])
    if wrong:
        raise UserError(f"{folder / 'record.json'}: damaged: {wrong}")
    wrong = _no_number(result, [] if result.get("iterations_left") else _metrics(folder / NAME))
    if wrong:
        raise UserError(f"{folder / 'result.json'}: damaged: its {wrong} is {result.get(wrong)!r}")
    if not 0 <= made["minutes"] < math.inf:
        raise UserError(f"{folder / 'record.json'}: damaged: its minutes is {made['minutes']!r}")
    config = saved.read(folder / "config.yaml")
    if re.fullmatch(r"seed-\d+", folder.name) and folder.name != f"seed-{config.seed}":
        raise UserError(f"{folder}: damaged: its run has the seed {config.seed}")
    return Record(folder, config, result, made)


def misfit(said: dict[str, Any], kinds: dict[str, Any]) -> str:
    """Return which entry is of another kind than ``kinds`` says, and what it is; "": none."""
    wrong = (name for name, kind in kinds.items() if not isinstance(said.get(name), kind))
    return next((f"{name} is {said.get(name)!r}" for name in wrong), "")


def wrong_starts(starts: Any) -> str:
    """Return what is wrong with what a run, or its record, says of its starts; "": nothing."""
    if not (isinstance(starts, list) and starts and all(isinstance(of, dict) for of in starts)):
        return "it has no starts, which say how the run was made"
    for start in starts:
        said = _UNSAID_OF_A_START | start
        wrong = misfit(said, _OF_A_START) or misfit(said["machine"], {"processor": str})
        if wrong:
            return f"a start's {wrong}"
    return ""


def _metrics(path: Path) -> list[str]:
    """Return what was measured of each test task, as the first line of ``test_tasks.csv`` says.

    Raises:
        UserError: naming the file, if it is missing or no such table.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            names = tuple(next(csv.reader(file), []))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a whole record") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if names[: len(ADDRESS)] != ADDRESS:
        raise UserError(f"{path}: damaged: its first line does not begin {','.join(ADDRESS)}")
    return list(names[len(ADDRESS) :])


def _no_number(result: dict[str, Any], tested: list[str]) -> str:
    """Return which entry of a result should be a number and is none; "": all are.

    Args:
        result: The result.
        tested: The metrics of its test, each of which it has, with the interval.
    """
    if result.get("iterations_left", 0):
        counts = ("iterations", "iterations_left")
        found = [name for name in counts if result[name] < 0]
        rate = result.get("iterations_per_second")
        # One that was stopped before it had done any has none.
        told = _is_number(rate) or (rate is None and not result["iterations"])
        return "".join(found[:1]) or ("" if told else "iterations_per_second")
    scores = [name for metric in tested for name in (metric, f"{metric}_ci95")]
    scores += [name for name in result if name.endswith(("accuracy", "loss", "ci95"))]
    # Of a regression, accuracy is None.
    named = [name for name in scores if "accuracy" in tested or name not in _OF_CLASSES]
    if result["tasks"] == 1:
        # Over one task there is no interval.
        named = [n for n in named if result.get(n) is not None or not n.endswith("ci95")]
    # A model that has diverged has a loss, but that is no number.
    judged = [name for name in named if "loss" not in name]
    return next((n for n in named if not isinstance(result.get(n), (int, float))), "") or (
        next((name for name in judged if not math.isfinite(result[name])), "")
    )


_OF_CLASSES = ("accuracy", "ci95", "non_transductive_accuracy")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


_KINDS: dict[str, dict[str, Any]] = {
    "record.json": {"starts": list, "minutes": (int, float), "hardware": dict, "note": str},
    "result.json": {
        "tasks": int, "transductive": bool, "iterations": int, "iterations_left": int,
        "diverged": (dict, NoneType), "skipped": int,
    },
}  # fmt: skip
"""What a record's files hold."""
_UNSAID: dict[str, Any] = {"iterations_left": 0, "diverged": None, "skipped": 0}
"""What a result means that does not say so."""
_OF_A_START: dict[str, Any] = {
    "time": str, "iteration": int, "git_commit": (str, NoneType), "processes": int,
    "threads": (int, NoneType), "machine": dict, "own_files": dict,
}  # fmt: skip
"""What a start says, in a run directory, too, where the commit may not be known."""
_UNSAID_OF_A_START: dict[str, Any] = {
    "processes": 1, "threads": None, "machine": {"processor": ""}, "own_files": {},
}  # fmt: skip
"""What a start of an earlier version does not say."""


def find(folder: Path) -> list[Record]:
    """Return the records in ``folder``: itself one, those of a preset's seeds, or of all presets.

    Raises:
        UserError: as `read`; or if two are of the same experiment and seed.
    """
    found: dict[str, Record] = {}
    for record in map(read, folders(folder)):
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
            for name in _KINDS
            for path in folder.glob(f"**/{name}")
            if name == "record.json" or path.parent.name.startswith("seed-")
        }
    )


def run_directories(folder: Path) -> list[Path]:
    """Return the run directories in ``folder``, itself or below it; a record has no checkpoints."""
    there = (path.parent for path in folder.glob("**/config.yaml"))
    return sorted(path for path in there if (path / "checkpoints").is_dir())


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
