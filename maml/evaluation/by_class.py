"""Accuracy by class: which of a split's classes are told apart, and which are taken for others."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from maml.errors import UserError
from maml.evaluation.scores import in_rounds
from maml.learners.objectives import REGRESSION
from maml.params import Params
from maml.run.files import write_text
from maml.strategies.local import Local
from maml.worker import Worker

NAME = "by_class.csv"
"""The file of a run directory that has the counts."""


class ByClass(NamedTuple):
    """How often queries of each class were taken for each.

    Attributes:
        names: Of the split's C classes; their numbers where nobody knows them by name.
        counts: ``{(true, predicted): count}``, places in ``names``, of pairs that occurred.
    """

    names: list[str]
    counts: Counter[tuple[int, int]]


def check(worker: Worker, split: str) -> None:
    """Refuse tasks of which it is not known what their classes are.

    Raises:
        UserError: naming ``--by-class``.
    """
    config = worker.config
    if worker.learner.objective is REGRESSION:
        raise UserError(f"--by-class: the tasks of --data {config.data} have no classes")
    if worker.evaluation(split).classes(torch.arange(1)) is None:
        raise UserError(
            f"--by-class: it is not known which classes the tasks of --learner {config.learner} on "
            f"--data {config.data} have"
        )


def by_class(
    strategy: Local,
    model: Params,
    split: str,
    tasks: int,
    *,
    transductive: bool,
    progress: bool = False,
) -> ByClass:
    """Return the answers to the tasks that `evaluate` scores, for the same arguments.

    ``transductive``: which of the two answers to a query counts.

    Raises:
        UserError: as `check`, and as `maml.learners.asked.confusions`.
    """
    worker = strategy.worker
    check(worker, split)
    episodes = worker.evaluation(split)
    counts: Counter[tuple[int, int]] = Counter()

    def evaluated(ids: Tensor) -> Tensor:
        found = worker.confusions(model, split, ids, worker.learner, transductive=transductive)
        classes = episodes.classes(ids)
        assert classes is not None
        for task, true, predicted in found.nonzero().tolist():
            pair = int(classes[task, true]), int(classes[task, predicted])
            counts[pair] += int(found[task, true, predicted])
        return ids

    in_rounds(strategy, split, tasks, evaluated, progress=progress)
    return ByClass(list(episodes.class_names or map(str, range(episodes.class_count or 0))), counts)


def lines(found: ByClass) -> list[str]:
    """Return a table for people: a line for each class, below a heading."""
    width = max(map(len, ("class", *found.names)))
    shown = [f"{'class':<{width}}  queries  accuracy  most often taken for"]
    for place, name in enumerate(found.names):
        row = {other: n for (true, other), n in found.counts.items() if true == place}
        queries, right = sum(row.values()), row.pop(place, 0)
        accuracy = f"{100 * right / queries:.2f} %" if queries else "–"
        # Between equals, the first in the list of classes, whatever the order of tasks.
        wrong = max(sorted(row), key=lambda other: row[other], default=None)
        taken = "–" if wrong is None else f"{found.names[wrong]} ({row[wrong]})"
        shown.append(f"{name:<{width}}  {queries:>7}  {accuracy:>8}  {taken}")
    return shown


def write(path: Path, found: ByClass) -> None:
    """Write a row ``true,predicted,count`` for each pair of classes that occurred.

    Raises:
        UserError: as `write_text`.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("true", "predicted", "count"))
    for (true, predicted), count in sorted(found.counts.items()):
        rows.writerow((found.names[true], found.names[predicted], count))
    write_text(path, text.getvalue())
