"""A record: the files that are kept of a run whose number stands in a table.

``launch/records/<preset>/seed-<n>/`` holds ``config.yaml``, ``result.json``, ``test_tasks.csv``,
``metrics.jsonl`` (thinned) and ``curves.png``, as a run directory does. It also holds
``record.json`` (how the run was made) and ``model.pt`` (the parameters, if at most 1 MB).

If a run changes settings of its preset, the first folder is ``<preset>+<field>=<value>+…``. A
digest is added if this name is too long or has characters that a file's name should not have.
"""

import hashlib
import math
import re
from pathlib import Path

import torch

from maml.config import Config
from maml.config.presets import changed
from maml.errors import UserError
from maml.evaluation.scores import means, with_headline
from maml.run import reading
from maml.run.files import TESTED, read_object
from maml.run.forms import NUMBER, RECORD, RESULT
from maml.run.reading import Run
from maml.studies import REPOSITORY

RECORDS = REPOSITORY / "launch" / "records"
MOST_BYTES = 1_000_000
"""Larger parameters are not kept."""
LONGEST = 150
"""Maximum length of a folder's name, without digest; most file systems allow 255 bytes."""


def place_of(config: Config) -> Path:
    """Return the path of a run's record below all records, by experiment and seed."""
    other = [f"+{name}={value}" for name, value in changed(config).items()]
    whole = "".join([config.preset, *other])
    name = re.sub(r"[^\w.+=-]+", "_", whole)
    if name != whole or len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return Path(name, f"seed-{config.seed}")


def read(folder: Path) -> Run:
    """Return the record in ``folder``; `other_means` checks its numbers."""
    for name, form in {"record.json": RECORD, "result.json": RESULT}.items():
        read_object(folder / name, form)
    record = reading.read(folder)
    if re.fullmatch(r"seed-\d+", folder.name) and folder.name != f"seed-{record.config.seed}":
        raise UserError(f"{folder}: damaged: its run has the seed {record.config.seed}")
    return record


EXACT = 1e-9
"""Tolerance between means of the same numbers, added up in another order."""


def other_means(run: Run) -> str:
    """Describe the first number in ``result.json`` that its tasks do not give; "" if all agree."""
    config, result, count = run.config, run.result, run.result.get("tasks")
    if not isinstance(count, int) or count < 1:
        return f"its number of tasks is {count}"
    asked = [("test", config.seed, index) for index in range(count)]
    there = [run.scores[address] for address in asked if address in run.scores]
    if len(there) < count:
        return f"it says {count} tasks, and {TESTED} has {len(there)} of them"
    names = list(there[0])
    values = torch.tensor([[row[name] for name in names] for row in there], dtype=torch.float64)
    expected = with_headline(means(values, "test", names), transductive=config.transductive)
    if config.epochs is None and not config.stop_after:
        expected["iterations"] = config.iterations
    for name, value in expected.items():
        if not alike(result.get(name), value, EXACT):
            return f"its {name} is {result.get(name)!r}, and {value} over the tasks"
    return ""


def alike(one: object, other: object, tolerance: float) -> bool:
    """Return whether two values are equal, numbers within ``tolerance``; NaN equals NaN."""
    if not (isinstance(one, NUMBER) and isinstance(other, NUMBER)):
        return one == other
    neither = math.isnan(one) and math.isnan(other)
    return neither or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def find(folder: Path) -> list[Run]:
    """Return the records in ``folder``; UserError if a number is wrong or a run is there twice."""
    found: dict[Path, Run] = {}
    for record in map(read, folders(folder)):
        if wrong := other_means(record):
            raise UserError(f"{record.path / 'result.json'}: damaged: {wrong}")
        other = found.setdefault(place_of(record.config), record)
        if other is not record:
            raise UserError(f"{record.path}: it is of the same experiment and seed as {other.path}")
    return list(found.values())


def folders(folder: Path) -> list[Path]:
    """Return the folders of all records in ``folder``, incomplete records included.

    Leave out hidden folders, in which `launch.record` makes a record.
    """
    made = {path.parent for path in folder.glob("**/record.json")}
    tested = {path.parent for path in folder.glob("**/result.json")}
    found = made | {path for path in tested if path.name.startswith("seed-")}
    return sorted(p for p in found if not any(n[0] == "." for n in p.relative_to(folder).parts))
