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
from typing import Any, NamedTuple

from maml.config import Config, saved
from maml.config.presets import changed
from maml.errors import UserError
from maml.params import Params
from maml.run.checkpoint import load_parameters
from maml.run.files import read_object
from maml.run.provenance import digest_of

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
    content = {"record.json": made, "result.json": {"iterations_left": 0, **result}}
    for name, kinds in _KINDS.items():
        for key, kind in kinds.items():
            if not isinstance(content[name].get(key), kind):
                raise UserError(
                    f"{folder / name}: damaged: its {key} is {content[name].get(key)!r}"
                )
    if not made["starts"]:
        raise UserError(f"{folder / 'record.json'}: damaged: it has no starts")
    wrong = _no_number(result)
    if wrong:
        raise UserError(f"{folder / 'result.json'}: damaged: its {wrong} is {result.get(wrong)!r}")
    if not 0 <= made["minutes"] < math.inf:
        raise UserError(f"{folder / 'record.json'}: damaged: its minutes is {made['minutes']!r}")
    config = saved.read(folder / "config.yaml", own=False)
    if re.fullmatch(r"seed-\d+", folder.name) and folder.name != f"seed-{config.seed}":
        raise UserError(f"{folder}: damaged: its run has the seed {config.seed}")
    return Record(folder, config, result, made)


def _no_number(result: dict[str, Any]) -> str:
    """Return which entry of a result should be a number and is none; "": all are."""
    if result.get("iterations_left", 0):
        counts = ("iterations", "iterations_left")
        found = [name for name in counts if result[name] < 0]
        rate = result.get("iterations_per_second")
        # One that was stopped before it had done any has none.
        told = _is_number(rate) or (rate is None and not result["iterations"])
        return "".join(found[:1]) or ("" if told else "iterations_per_second")
    scores = [name for name in result if name.endswith(("accuracy", "loss", "ci95"))]
    # Of a regression, accuracy is None.
    named = [n for n in scores if "accuracy_ci95" in result or n not in _OF_CLASSES]
    if result["tasks"] == 1:
        # Over one task there is no interval.
        named = [name for name in named if result[name] is not None or not name.endswith("ci95")]
    # A model that has diverged has a loss, but that is no number.
    judged = [name for name in named if "loss" not in name]
    return next((n for n in named if not isinstance(result[n], (int, float))), "") or (
        next((name for name in judged if not math.isfinite(result[name])), "")
    )


_OF_CLASSES = ("accuracy", "ci95", "non_transductive_accuracy")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


_KINDS: dict[str, dict[str, Any]] = {
    "record.json": {"starts": list, "minutes": (int, float), "hardware": dict, "note": str},
    "result.json": {
        "tasks": int, "transductive": bool, "iterations": int, "iterations_left": int,
    },
}  # fmt: skip
"""What a record's files hold at least, the last one of a run that has not finished."""


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
