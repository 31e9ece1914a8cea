"""``python -m launch.check_record DIR``: check that a record's model scores what the record says.

    python -m launch.check_record launch/records/maml-omniglot-5way-1shot --tasks 600

The command tests the kept parameters again and compares each task's scores with the record. Losses
must agree to 1e-4. Accuracies must agree, too, except for one task in 200: if a query's two best
classes are almost equal, another processor's rounding decides.

A record is the files that are kept of a run whose number stands in a table. As a run directory,
``launch/records/<preset>/seed-<n>/`` holds ``config.yaml``, ``result.json``, ``test_tasks.csv``,
``metrics.jsonl`` (thinned) and ``curves.png``. It also holds ``record.json`` (how the run was made)
and ``model.pt`` (the parameters, if at most 1 MB). If a run changes settings of its preset, the
first folder is ``<preset>+<field>=<value>+…``. A digest is added if this name is too long or has
characters that a file's name should not have.
"""

import argparse
import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path

import torch

from maml.config import Config, registry
from maml.config.parser import Parser, add_trust, at_least
from maml.config.presets import changed, with_values
from maml.errors import UserError
from maml.evaluation.best import RECORDED, recorded_content
from maml.evaluation.scores import means, of_tasks, with_headline
from maml.params import Params
from maml.run import checkpoint, directory, reading
from maml.run.files import NUMBER, RECORD, RESULT, TESTED, Scores, read_object
from maml.run.provenance import other_files
from maml.run.reading import Run
from maml.strategies.local import alone
from maml.studies import REPOSITORY

RECORDS = REPOSITORY / "launch" / "records"
MOST_BYTES = 1_000_000
"""Larger parameters are not kept."""
LONGEST = 150
"""Maximum length of a folder's name, without digest; most file systems allow 255 bytes."""
EXACT = 1e-9
"""Tolerance between means of the same numbers, added up in another order."""
TOLERANCE = 1e-4
FEW = 0.005
"""The share of tasks whose accuracy may differ from the record."""


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
    records: dict[Path, Run] = {}
    for record in map(read, folders(folder)):
        if wrong := other_means(record):
            raise UserError(f"{record.path / 'result.json'}: damaged: {wrong}")
        other = records.setdefault(place_of(record.config), record)
        if other is not record:
            raise UserError(f"{record.path}: it is of the same experiment and seed as {other.path}")
    return list(records.values())


def folders(folder: Path) -> list[Path]:
    """Return the folders of all records in ``folder``, incomplete records included.

    Leave out hidden folders, in which `launch.record` makes a record.
    """
    made = {path.parent for path in folder.glob("**/record.json")}
    tested = {path.parent for path in folder.glob("**/result.json")}
    found = made | {path for path in tested if path.name.startswith("seed-")}
    return sorted(p for p in found if not any(n[0] == "." for n in p.relative_to(folder).parts))


def main(arguments: list[str]) -> int:
    """Check records; return 1 if a model does not score what its record says, else 0."""
    parser = Parser(prog="python -m launch.check_record", description=__doc__)
    parser.add_argument("record", metavar="DIR", type=Path, help="a record, or a folder of some")
    text = "how many of its tasks (default: 600)"
    parser.add_argument("--tasks", type=at_least(1), default=600, help=text)
    parser.add_argument("--data-root", help="where the data sets are (default: $MAML_DATA)")
    add_trust(parser, "a record's config.yaml")
    options = parser.parse_args(arguments)
    wrong = 0
    records = folders(options.record)
    if not records:
        raise UserError(f"{options.record}: no record there")
    for folder in records:
        try:
            reason, line = _checked(read(folder), options)
        except UserError as error:
            if len(records) == 1:
                raise
            # Go on, because the other records are still to be checked.
            reason = line = str(error)
        print(f"{folder}: {line}", flush=True)
        wrong += bool(reason)
    return int(wrong > 0)


def _checked(record: Run, options: argparse.Namespace) -> tuple[str, str]:
    """Return what is wrong with a record, or "", and the line to print about it."""
    here = directory.config_here(record.path, options.data_root, "cpu", trust=options.trust)
    config = with_values(here, threads=None)
    registry.import_theirs(config)
    if wrong := other_means(record):
        return wrong, wrong
    too_large = (record.made.get("model_bytes") or 0) > MOST_BYTES
    if too_large and not (record.path / RECORDED).is_file():
        return "", "its numbers are those of its tasks; its parameters were too large to be kept"
    params = recorded_content(record.path)["model"]
    tasks = min(options.tasks, len(record.scores))
    reason = retested(replace(record, config=config), params, tasks)
    said = [reason or f"{tasks} tasks score what it says"]
    own_files = record.made["starts"][-1].get("own_files") or {}
    said += [f"{line} since it was recorded" for line in other_files(config, own_files)]
    if "ensemble" in record.result:
        said.append("its ensemble is not tested again: the other models are not kept")
    return reason, "; ".join(said)


def retested(record: Run, params: Params, tasks: int) -> str:
    """Test ``params`` on a record's first tasks; return how the scores differ, or ""."""
    strategy = alone(record.config)
    worker, seed = strategy.worker, record.config.seed
    checkpoint.check_model({"model": params}, worker.learner.meta_parameters(), "the record")
    values = of_tasks(strategy, params, "test", tasks, progress=True).tolist()
    scores = {
        ("test", seed, index): dict(zip(worker.evaluation_names, row, strict=True))
        for index, row in enumerate(values)
    }
    return differing({a: row for a, row in record.scores.items() if a[2] < tasks}, scores)


def differing(said: Scores, now: Scores) -> str:
    """Return how ``found`` differs from the scores ``said`` for the same tasks; "" if it agrees."""
    missing = sorted(said.keys() - now.keys())
    if missing:
        return f"task {missing[0]} was not tested"
    off, grave = dict[int, str](), list[str]()
    for address, row in said.items():
        for name, value in row.items():
            if name not in now[address]:
                return f"there is no {name} of a task"
            other, index = now[address][name], address[2]
            if alike(other, value, TOLERANCE):
                continue
            line = f"task {index}: {name} was {value:.6g} and is {other:.6g}"
            off.setdefault(index, line)
            if name.endswith("loss") or not math.isfinite(value):
                grave.append(line)
    if not grave and len(off) <= FEW * len(said):
        return ""
    first = [*grave, *off.values()][0]
    return f"{len(off)} of {len(said)} tasks differ; the first is {first}"
