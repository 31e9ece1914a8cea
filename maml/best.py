"""Which of a run's checkpoints validated best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maml.errors import UserError
from maml.run import checkpoint
from maml.run.files import read_rows
from maml.scores import headline


def best(run_dir: Path, iterations: Iterable[int], *, transductive: bool) -> list[int]:
    """Return those of ``iterations`` that were validated, the best first; of equals, the latest.

    The best has the greatest accuracy or return, or the least loss; one that is no number is worse
    than any that is.

    Args:
        run_dir: The run, whose metrics.jsonl has the validations.
        iterations: Of its checkpoints.
        transductive: Which of the two accuracies counts.

    Raises:
        UserError: as `read_rows`.
    """
    prefix = "" if transductive else "non_transductive_"
    there = set(iterations)
    scores: dict[int, float] = {}
    for row in read_rows(run_dir / "metrics.jsonl"):
        if row.get("split") == "validation" and row["iteration"] in there:
            judged = headline(row)
            if f"{prefix}{judged}" not in row:  # who mixes examples has no such answer
                continue
            sign = -1 if judged == "loss" else 1
            score = sign * row[f"{prefix}{judged}"]
            # A comparison with it says nothing, and a sort would leave the others in any order.
            scores[row["iteration"]] = -math.inf if math.isnan(score) else score
    return sorted(scores, key=lambda iteration: (scores[iteration], iteration), reverse=True)


def chosen(run_dir: Path, wanted: str, *, transductive: bool, flag: str = "--iteration") -> Path:
    """Return the path of a kept checkpoint.

    Args:
        run_dir: The run.
        wanted: Its iteration, or "best", the one that validated best.
        transductive: Which of the two accuracies counts.
        flag: What the caller calls ``wanted``.

    Raises:
        UserError: naming the flag, and what there is.
    """
    kept = checkpoint.numbered_checkpoints(run_dir)
    there_are = f"{run_dir} keeps those of {', '.join(map(str, kept)) or 'none'}"
    if wanted != "best":
        if not wanted.isdecimal() or int(wanted) not in kept:
            raise UserError(f"{flag} {wanted}: no checkpoint of it; {there_are}")
        return kept[int(wanted)]
    validated = best(run_dir, kept, transductive=transductive)
    if not validated:
        raise UserError(f"{flag} best: no kept checkpoint was validated; {there_are}")
    return kept[validated[0]]


def load_best(run_dir: Path, count: int, *, transductive: bool) -> list[dict[str, Any]]:
    """Return the contents of the ``count`` kept checkpoints that validated best, the best first.

    Raises:
        UserError: naming ``--ensemble``, which asks for them, if there are not so many; or a file
            that cannot be read.
    """
    kept = checkpoint.numbered_checkpoints(run_dir)
    validated = best(run_dir, kept, transductive=transductive)
    if len(validated) < count:
        there = ", ".join(map(str, sorted(validated))) or "none"
        raise UserError(
            f"--ensemble {count}: {run_dir} keeps too few checkpoints that were validated: "
            f"{there}; train with --keep-best {count}, and validate as often as it saves"
        )
    return [checkpoint.load(kept[iteration]) for iteration in validated[:count]]
