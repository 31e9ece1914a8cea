"""``python -m launch.check_record DIR``: check that a record's model scores what the record says.

    python -m launch.check_record launch/records/maml-omniglot-5way-1shot --tasks 600

The command tests the kept parameters again and compares each task's scores with the record. Losses
must agree to 1e-4. Accuracies must agree, too, except for one task in 200: if a query's two best
classes are almost equal, another processor's rounding decides.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from maml.config import registry
from maml.config.parser import Parser, add_trust, at_least
from maml.config.presets import with_values
from maml.errors import UserError
from maml.evaluation.best import RECORDED, recorded_content
from maml.evaluation.scores import of_tasks
from maml.params import Params
from maml.run import checkpoint, directory
from maml.run.files import Scores
from maml.run.provenance import other_files
from maml.run.reading import Run
from maml.strategies.local import alone
from maml.studies import recorded

TOLERANCE = 1e-4
FEW = 0.005
"""The share of tasks whose accuracy may differ from the record."""


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
    folders = recorded.folders(options.record)
    if not folders:
        raise UserError(f"{options.record}: no record there")
    for folder in folders:
        try:
            reason, line = _checked(recorded.read(folder), options)
        except UserError as error:
            if len(folders) == 1:
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
    if wrong := recorded.other_means(record):
        return wrong, wrong
    too_large = (record.made.get("model_bytes") or 0) > recorded.MOST_BYTES
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
    found = {
        ("test", seed, index): dict(zip(worker.evaluation_names, row, strict=True))
        for index, row in enumerate(values)
    }
    return differing({a: row for a, row in record.scores.items() if a[2] < tasks}, found)


def differing(said: Scores, found: Scores) -> str:
    """Return how ``found`` differs from the scores ``said`` for the same tasks; "" if it agrees."""
    missing = sorted(said.keys() - found.keys())
    if missing:
        return f"task {missing[0]} was not tested"
    off, grave = dict[int, str](), list[str]()
    for address, row in said.items():
        for name, value in row.items():
            if name not in found[address]:
                return f"there is no {name} of a task"
            other, index = found[address][name], address[2]
            if recorded.alike(other, value, TOLERANCE):
                continue
            line = f"task {index}: {name} was {value:.6g} and is {other:.6g}"
            off.setdefault(index, line)
            if name.endswith("loss") or not math.isfinite(value):
                grave.append(line)
    if not grave and len(off) <= FEW * len(said):
        return ""
    first = [*grave, *off.values()][0]
    return f"{len(off)} of {len(said)} tasks differ; the first is {first}"
