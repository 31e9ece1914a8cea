"""``test_tasks.csv``: what each test task scored, so that learners can be compared task by task.

A row is a task. Its address (split, seed, index) says which: runs with the same data set, ways,
shots, queries and seed are tested on the same tasks.
"""

import contextlib
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
    """Write the file: row i is task i of ``split``, with its metrics ``names``, to the bit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ADDRESS, *names])
    for index, row in enumerate(values):
        writer.writerow([split, seed, index, *map(repr, row)])
    write_text(run_dir / NAME, text.getvalue())


def drop_tasks(run_dir: Path) -> None:
    """Remove the file of an earlier test, whose result is replaced by one without a test."""
    with contextlib.suppress(OSError):
        (run_dir / NAME).unlink()


def read_tasks(path: Path) -> Scores:
    """Return what each task scored; a UserError names a file that is missing or damaged."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines(), strict=True))
        scores = {
            (row.pop("split"), int(row.pop("seed")), int(row.pop("index"))): {
                name: float(value) for name, value in row.items()
            }
            for row in rows
        }
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if len(scores) != len(rows):
        raise UserError(f"{path}: damaged: a task is there twice")
    return scores
