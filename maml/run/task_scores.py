"""``test_tasks.csv``: what each test task scored, so that learners can be compared task by task.

A row is a task. Its address (split, seed, index) says which: runs with the same data set, ways,
shots, queries and seed are tested on the same tasks.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from maml.errors import UserError
from maml.run.files import write_text

NAME = "test_tasks.csv"
ADDRESS = ("split", "seed", "index")

Scores = dict[tuple[str, int, int], dict[str, float]]
"""By address (split, seed, index): the task's metrics by name."""


def write_tasks(
    run_dir: Path, split: str, seed: int, names: Sequence[str], values: Sequence[Sequence[float]]
) -> None:
    """Write the file: row i is task i of ``split``, with its metrics ``names``, to the last bit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ADDRESS, *names])
    for index, row in enumerate(values):
        writer.writerow([split, seed, index, *map(repr, row)])
    write_text(run_dir / NAME, text.getvalue())


def read_tasks(path: Path) -> Scores:
    """Return what each task scored, from a file that `write_tasks` wrote, or raise a UserError."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if not rows or tuple(rows[0][: len(ADDRESS)]) != ADDRESS:
        raise UserError(f"{path}: not a table of tasks: its first line must begin {ADDRESS}")
    names = rows[0][len(ADDRESS) :]
    scores: Scores = {}
    for number, row in enumerate(rows[1:], start=2):
        try:
            address = (row[0], int(row[1]), int(row[2]))
            values = dict(zip(names, map(float, row[len(ADDRESS) :]), strict=True))
        except (ValueError, IndexError):
            raise UserError(f"{path}: line {number} is damaged") from None
        if address in scores:
            raise UserError(f"{path}: line {number}: task {address} is there twice")
        scores[address] = values
    return scores
