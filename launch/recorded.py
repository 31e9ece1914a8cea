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
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from maml.config import Config, saved
from maml.config.presets import changed
from maml.errors import UserError
from maml.params import Params
from maml.run.checkpoint import load_parameters
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
    return Record(folder, saved.read(folder / "config.yaml", own=False), result, made)


_KINDS: dict[str, dict[str, Any]] = {
    "record.json": {"starts": list, "minutes": (int, float), "hardware": dict, "note": str},
    "result.json": {
        "tasks": int, "transductive": bool, "iterations": int, "iterations_left": int,
    },
}  # fmt: skip
"""What a record's files hold at least, the last one of a run that has not finished."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UserError: naming it, if it is missing, damaged or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a whole record or run") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: damaged: no JSON object")
    return found


def find(folder: Path) -> list[Record]:
    """Return the records in ``folder``: itself one, those of a preset's seeds, or of all presets.

    Raises:
        UserError: as `read`.
    """
    return [read(path) for path in folders(folder)]


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
    try:
        digest = digest_of(record.model)
    except OSError as error:
        raise UserError(f"{record.model}: {error.strerror}: no parameters are kept") from error
    if digest != record.made.get("model_sha256"):
        raise UserError(f"{record.model}: not the file that was recorded: its digest differs")
    return load_parameters(record.model)
