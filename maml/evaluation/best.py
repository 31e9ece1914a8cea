"""Find the model of a run that validated best."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from maml.config import registry
from maml.config.saved import read
from maml.errors import UserError
from maml.params import Params
from maml.run import checkpoint
from maml.run.files import (
    NUMBER,
    RECORD,
    RESULT,
    headline,
    naming,
    read_json,
    read_object,
    read_rows,
)
from maml.run.provenance import digest_of

RECORDED = "model.pt"
"""The file of a record that holds the parameters: see `maml.studies.recorded`."""


def best(run_dir: Path, iterations: Iterable[int], *, transductive: bool) -> list[int]:
    """Return the validated ones among ``iterations``, the best first.

    The best has the greatest accuracy or return (in regression the smallest loss). A tie goes to
    the smaller loss, then to the later one. NaN ranks last. ``transductive`` selects the metric.
    """
    there, scores = set(iterations), dict[int, tuple[float, float]]()
    for row in read_rows(run_dir / "metrics.jsonl"):
        if row.get("split") == "validation" and row["iteration"] in there:
            score = _score(row, transductive=transductive)
            if score is not None:
                scores[row["iteration"]] = score
    return sorted(scores, key=lambda iteration: (scores[iteration], iteration), reverse=True)


def _score(row: dict[str, Any], *, transductive: bool) -> tuple[float, float] | None:
    """Return a validation's score and negated loss (greater is better), or None without a score."""
    prefix = "" if transductive else "non_transductive_"
    judged = headline(row)
    value, loss = row.get(f"{prefix}{judged}"), row.get(f"{prefix}loss")
    if not isinstance(value, NUMBER):  # this validation lacks the metric
        return None
    first = -value if judged == "loss" else value
    second = -loss if isinstance(loss, NUMBER) else -math.inf
    # Comparisons with NaN are always false, so a sort could leave the other scores in any order.
    return -math.inf if math.isnan(first) else first, -math.inf if math.isnan(second) else second


class BestModel:
    """Keeps the ``model`` that validated best so far, for ``--test-model best``.

    Checkpoints include this model. So a run that continues in another directory, without the
    earlier checkpoints, tests the same model.
    """

    def __init__(self, *, transductive: bool) -> None:
        self._transductive, self._score = transductive, (-math.inf, -math.inf)
        self.iteration: int | None = None
        self.model: Params = {}

    def offer(self, row: dict[str, Any], iteration: int, model: Params) -> None:
        """Keep a copy of ``model`` with validation ``row``, unless an earlier one is better."""
        score = _score(row, transductive=self._transductive)
        if score is not None and (self.iteration is None or score >= self._score):
            copy = {name: tensor.detach().clone() for name, tensor in model.items()}
            self.iteration, self._score, self.model = iteration, score, copy

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; an empty one if no model is kept yet."""
        if self.iteration is None:
            return {}
        model = {name: tensor.cpu() for name, tensor in self.model.items()}
        return {
            "iteration": self.iteration, "score": list(self._score), "model": model,
            "transductive": self._transductive,
        }  # fmt: skip

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Restore what `state` returned, onto the device ``home``."""
        if state:
            score = state["score"]
            # Checkpoints of an earlier version have no loss. With -inf, a tie goes to the later.
            self._score = (score, -math.inf) if isinstance(score, float) else tuple(score)
            self.iteration = state["iteration"]
            self.model = {name: tensor.to(home) for name, tensor in state["model"].items()}


def content_of(
    run_dir: Path, wanted: str | None, *, transductive: bool, flag: str = "--iteration"
) -> dict[str, Any]:
    """Return the content of a run's checkpoint, or of the model that a record keeps.

    ``wanted`` is an iteration; or "best" for the checkpoint that validated best, by the
    ``transductive`` or non-transductive metric; or None for the model that the run tests. A
    UserError names ``flag`` and lists the checkpoints that exist.
    """
    if wanted is None and (run_dir / RECORDED).is_file():
        return recorded_content(run_dir)
    if wanted in (None, "best"):
        try:
            last = checkpoint.load(checkpoint.last_checkpoint(run_dir))
        except checkpoint.DamagedError:
            if wanted is None:
                raise
            last = {}
        # `last` has the best model of all validations. Use it if the run judged by this metric.
        if wanted is None or last.get("best", {}).get("transductive") == transductive:
            return checkpoint.tested(last)
    kept = checkpoint.numbered_checkpoints(run_dir)
    there_are = f"{run_dir} keeps those of {', '.join(map(str, kept)) or 'none'}"
    if wanted == "best":
        chosen = best(run_dir, kept, transductive=transductive)[:1]
        if not chosen:
            raise UserError(f"{flag} best: no kept checkpoint was validated; {there_are}")
    else:
        chosen = [number for number in kept if str(number) == wanted]
        if not chosen:
            raise UserError(f"{flag} {wanted}: there is no such checkpoint; {there_are}")
    return checkpoint.load(kept[chosen[0]])


def recorded_content(record: Path) -> dict[str, Any]:
    """Return a record in the form of a checkpoint; a UserError names a missing or changed file."""
    made = read_object(record / "record.json", RECORD) if (record / "record.json").exists() else {}
    with naming(record / RECORDED, "{}: it was recorded"):
        digest = digest_of(record / RECORDED)
    if made.get("model_sha256", digest) != digest:
        raise UserError(f"{record / RECORDED}: not the file that was recorded: its digest differs")
    # Empty if the run was not tested, or if an earlier version wrote the result.
    tested = read_json(record / "result.json", RESULT).get("tested_iteration")
    config = read(record / "config.yaml")
    starts = made.get("starts") or [{}]
    return {
        "model": checkpoint.load_parameters(record / RECORDED)[0],
        "iteration": tested or config.iterations,
        "own_files": starts[-1].get("own_files") or {},
        "division": made.get("division"),
        "config": {kind: getattr(config, kind) for kind in registry.KINDS},
    }


def load_best(run_dir: Path, count: int, *, transductive: bool) -> list[dict[str, Any]]:
    """Return the contents of the ``count`` kept checkpoints that validated best, the best first."""
    kept = checkpoint.numbered_checkpoints(run_dir)
    validated = best(run_dir, kept, transductive=transductive)
    if len(validated) < count:
        there = ", ".join(map(str, sorted(validated))) or "none"
        raise UserError(
            f"--ensemble {count}: {run_dir} keeps too few checkpoints that were validated: "
            f"{there}; train with --keep-best {count}, and as many validations (--eval-every)"
        )
    return [checkpoint.load(kept[iteration]) for iteration in validated[:count]]
