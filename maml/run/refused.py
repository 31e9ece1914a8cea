"""Steps that were not taken, as their loss or gradient was not finite: which tasks, and the model.

``nonfinite.jsonl`` has a row for each, ``nonfinite/`` the model as it was before the first few.
``python -m maml.replay`` runs the tasks of one again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maml.errors import UserError
from maml.run import checkpoint, files

MODELS = 5
"""How many models are kept: a run that skips steps may skip thousands."""


def rows_of(run_dir: Path) -> Path:
    """Return where the rows are, whether or not there are any."""
    return run_dir / "nonfinite.jsonl"


def _model_of(run_dir: Path, iteration: int) -> Path:
    """Return where the model is that step ``iteration``, counted from 1, was refused with."""
    return run_dir / "nonfinite" / f"iteration-{iteration:08d}.pt"


def write(run_dir: Path, row: dict[str, Any], content: dict[str, Any]) -> None:
    """Append the ``row`` of a step that was not taken; save ``content``, a checkpoint before it."""
    files.append_line(rows_of(run_dir), json.dumps(row))
    path = _model_of(run_dir, row["iteration"])
    if path.exists() or len(list(path.parent.glob("*.pt"))) < MODELS:
        checkpoint.save(path, content)


def skipped(run_dir: Path, until: int) -> int:
    """Return how many of a run's steps, ``until`` this iteration, were skipped."""
    rows = files.read_rows(rows_of(run_dir))
    steps = {row["iteration"] for row in rows if row.get("action") == "skip"}
    return len(steps & set(range(until + 1)))


def read(run_dir: Path, iteration: int | None) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """Return the row of a refused step, its tasks ``[B]`` and a checkpoint of before it.

    Without an ``iteration`` it is the last whose model was kept; a UserError if there is none.
    """
    rows = {row["iteration"]: row for row in files.read_rows(rows_of(run_dir))}
    kept = [number for number in rows if _model_of(run_dir, number).exists()]
    if not kept:
        raise UserError(f"{rows_of(run_dir)}: no step of this run was refused: nothing to replay")
    if iteration is not None and iteration not in kept:
        there = ", ".join(map(str, sorted(kept)))
        raise UserError(f"--iteration {iteration}: no model was kept of it; of {there}")
    row = rows[max(kept) if iteration is None else iteration]
    try:
        tasks = torch.tensor(row["tasks"], dtype=torch.int64).reshape(-1)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{rows_of(run_dir)}: a row without its tasks: it is damaged") from error
    return row, tasks, checkpoint.load(_model_of(run_dir, row["iteration"]))
