"""Watch each step, so that training does not diverge unnoticed.

The run does not take a step whose loss or gradient is not finite. Diverged weights can also give
finite nonsense, so the guard warns if the loss stays far above its initial value.

``nonfinite.jsonl`` has a row for each step that was not taken. ``nonfinite/`` has the models before
the first few of these steps. ``python -m maml.replay`` runs the tasks of such a step again.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datasets.episodes import Episodes
from datasets.tasks import Task
from maml.errors import UserError
from maml.metagradient.by_task import one_by_one
from maml.run import checkpoint, files
from maml.training.run import Run

MODELS = 5
"""Keep at most this many models, because a run may skip thousands of steps."""

SKIPPED_IN_A_ROW = 100
"""End the run after this many skipped steps in a row, because later steps would fail, too."""

FAR = 4.0
"""A loss counts as far above the initial loss if it is more than this many times as large."""

LONG = 100
"""Look at this many latest iterations; warn if the loss is far above in most of them."""


class Guard:
    """Checks the loss of each step, alike in all driving processes; only rank 0 prints."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._beginning: float | None = None
        self._far: deque[bool] = deque(maxlen=LONG)
        self._loss = math.nan
        self._in_a_row, self._said = 0, False

    def look(self, loss: float, say: Callable[[str], None], *, taken: bool = True) -> None:
        """Check the mean ``loss`` of the next step; give ``say`` one warning at most."""
        self._in_a_row = 0 if taken else self._in_a_row
        if math.isfinite(loss):
            self._beginning = loss if self._beginning is None else self._beginning
            self._loss = loss
        # If the initial loss is zero or less, it gives no scale: no finite loss is then far above.
        beginning = self._beginning or 0.0
        self._far.append(not math.isfinite(loss) or 0 < FAR * beginning < loss)
        if len(self._far) == LONG and self._is_far() and not self._said:
            self._said = True
            if self._run.speaks:
                say(
                    f"the loss is {loss:.3g} at iteration {self._run.iteration + 1} and began with "
                    f"{beginning:.3g}: for {LONG} iterations it has mostly been more than {FAR:g} "
                    "times that, so training has diverged; a smaller --meta-lr or --inner-lr may "
                    "help"
                )

    def refuse(self, loss: float, reason: str, tasks: Tensor, say: Callable[[str], None]) -> None:
        """Record that the next step, on ``tasks [B]``, cannot be taken because of ``reason``.

        Raise UserError, which ends the run, with ``--on-nonfinite stop``, or if none of the last
        `SKIPPED_IN_A_ROW` steps could be taken.
        """
        self._in_a_row += 1
        run, number = self._run, self._run.iteration + 1
        action = run.config.on_nonfinite
        endless = self._in_a_row >= SKIPPED_IN_A_ROW
        if run.speaks:
            row = {
                "iteration": number, "reason": reason, "action": action, "tasks": tasks.tolist(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }  # fmt: skip
            files.append_row(rows_of(run.dir), row)
            path = _model_of(run.dir, number)
            if path.exists() or len(list(path.parent.glob("*.pt"))) < MODELS:
                checkpoint.save(path, run.content() | {"optimizer": {}})
        of_data = ""
        if action != "skip" or endless or self._in_a_row == 1:
            of_data = not_finite_in(run.worker.training, tasks)
        what = f"{reason} at iteration {number}"
        replay = f"python -m maml.replay {run.dir} shows which tasks it is"
        if action == "skip" and not endless:
            if self._in_a_row == 1 and run.speaks:
                say(f"{what}: {of_data and f'{of_data}; '}that step is skipped; {replay}")
            self.look(loss, say, taken=False)
            return
        if endless:
            what += f", as at each of the last {SKIPPED_IN_A_ROW}"
        otherwise = "" if endless else "; --on-nonfinite skip goes on without such steps"
        advice = "" if of_data else "; a smaller --meta-lr or --inner-lr may help"
        reason = of_data or "training has diverged"
        line = f"{what}: {reason}; that step was not taken; {replay}{advice}{otherwise}"
        raise run.save_before(UserError(line)) from None

    def diverged(self) -> dict[str, float] | None:
        """Return the last loss and the first, if a run that ends now has diverged; else None."""
        if self._is_far() and self._beginning is not None:
            return {"loss": self._loss, "beginning": self._beginning}
        return None

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain numbers, for its checkpoint."""
        return {
            "beginning": self._beginning, "far": list(self._far), "loss": self._loss,
            "in_a_row": self._in_a_row,
        }  # fmt: skip

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Restore what `state` returned; an earlier version's is empty or lacks an entry."""
        if state:
            self._beginning, self._loss = state.get("beginning"), state["loss"]
            self._far.extend(state["far"])
            self._in_a_row = state.get("in_a_row", 0)

    def _is_far(self) -> bool:
        """Return whether most of the last `LONG` losses (or of all, if fewer) are far above."""
        return 2 * sum(self._far) > len(self._far)


def not_finite_in(training: Episodes, ids: Tensor) -> str:
    """Name the first of the tasks ``ids [B]`` whose own numbers are not finite, or return ""."""
    for id in ids:
        for task in one_by_one(training.tasks(id[None])):
            for name, part in task._asdict().items() if isinstance(task, Task) else ():
                if not part.isfinite().all():
                    return f"{name} of train task {int(id)} has values that are not finite"
    return ""


def rows_of(run_dir: Path) -> Path:
    """Return the path of ``nonfinite.jsonl``, whether or not it exists."""
    return run_dir / "nonfinite.jsonl"


def _model_of(run_dir: Path, iteration: int) -> Path:
    """Return the path of the model before the refused step ``iteration``, counted from 1."""
    return run_dir / "nonfinite" / f"iteration-{iteration:08d}.pt"


def read_refused(
    run_dir: Path, iteration: int | None
) -> tuple[dict[str, Any], Tensor, dict[str, Any]]:
    """Return a refused step's row, tasks ``[B]`` and checkpoint; by default the last kept one's."""
    rows = {row["iteration"]: row for row in files.read_rows(rows_of(run_dir), mended=True)}
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
