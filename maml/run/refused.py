"""Steps that were not taken, as their loss or gradient was not finite: which tasks, and the model.

``nonfinite.jsonl`` has a row for each, ``nonfinite/`` the model as it was before the first few.
``python -m maml.replay`` runs the tasks of one again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maml.config import MUST_MATCH, Config
from maml.errors import UserError
from maml.params import Params
from maml.run import checkpoint, files

MODELS = 5
"""How many models are kept: a run that skips steps may skip thousands."""


def rows_of(run_dir: Path) -> Path:
    """Return where the rows are, whether or not there are any."""
    return run_dir / "nonfinite.jsonl"


def model_of(run_dir: Path, iteration: int) -> Path:
    """Return where the model is that step ``iteration``, counted from 1, was refused with."""
    return run_dir / "nonfinite" / f"iteration-{iteration:08d}.pt"


def record(
    run_dir: Path,
    config: Config,
    *,
    iteration: int,
    reason: str,
    action: str,
    tasks: Tensor,
    model: Params,
    own_files: dict[str, dict[str, str]],
) -> None:
    """Write down a step that was not taken.

    Args:
        run_dir: The run directory.
        config: The configuration.
        iteration: The number of the step, counted from 1.
        reason: What was not finite.
        action: "stop" or "skip": what the run does now.
        tasks: ``[B]`` int64 ids of its training tasks.
        model: The meta-parameters that they were computed with.
        own_files: The digests of a user's own files that they were computed by.

    Raises:
        UserError: naming the file, if one cannot be written.
    """
    row = {
        "iteration": iteration,
        "reason": reason,
        "action": action,
        "tasks": tasks.tolist(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    files.append_line(rows_of(run_dir), json.dumps(row))
    path = model_of(run_dir, iteration)
    if path.exists() or len(list(path.parent.glob("*.pt"))) < MODELS:
        content = {
            "model": {name: tensor.cpu() for name, tensor in model.items()},
            "optimizer": {},
            "iteration": iteration - 1,
            "seconds": 0.0,
            "own_files": own_files,
            "config": {name: getattr(config, name) for name in MUST_MATCH},
        }
        checkpoint.save(path, content)


def skipped(run_dir: Path, until: int) -> int:
    """Return how many of a run's steps, ``until`` this iteration, were skipped."""
    rows = files.read_rows(rows_of(run_dir))
    return len(
        {row["iteration"] for row in rows if row.get("action") == "skip"} & set(range(until + 1))
    )


def read(run_dir: Path, iteration: int | None) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """Return the row of a refused step, its tasks ``[B]`` and a checkpoint of before it.

    Args:
        run_dir: The run directory.
        iteration: Which; None: the last whose model was kept.

    Raises:
        UserError: naming the file, if there is no such step or it cannot be read.
    """
    rows = {row["iteration"]: row for row in files.read_rows(rows_of(run_dir))}
    kept = [number for number in rows if model_of(run_dir, number).exists()]
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
    return row, tasks, checkpoint.load(model_of(run_dir, row["iteration"]))
