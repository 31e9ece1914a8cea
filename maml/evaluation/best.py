"""Which of a run's models validated best."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from maml.config import registry
from maml.errors import UserError
from maml.evaluation.scores import headline
from maml.params import Params
from maml.run import checkpoint, directory
from maml.run.files import read_object, read_rows
from maml.run.provenance import digest_of

RECORDED = "model.pt"
"""The parameters in a record: see `maml.studies.recorded`."""


def best(run_dir: Path, iterations: Iterable[int], *, transductive: bool) -> list[int]:
    """Return those of ``iterations`` that were validated, the best first.

    The best has the greatest accuracy or return, of equals the least loss, and of these the latest.
    What is no number is worse than any that is. ``transductive``: which of two accuracies counts.
    """
    there, scores = set(iterations), dict[int, tuple[float, float]]()
    for row in read_rows(run_dir / "metrics.jsonl"):
        if row.get("split") == "validation" and row["iteration"] in there:
            score = _score(row, transductive=transductive)
            if score is not None:
                scores[row["iteration"]] = score
    return sorted(scores, key=lambda iteration: (scores[iteration], iteration), reverse=True)


def _score(row: dict[str, Any], *, transductive: bool) -> tuple[float, float] | None:
    """Return what a validation is judged by, more being better, and less its loss; None if none."""
    prefix = "" if transductive else "non_transductive_"
    judged = headline(row)
    value, loss = row.get(f"{prefix}{judged}"), row.get(f"{prefix}loss")
    if value is None:  # a network that mixes examples has transductive answers alone
        return None
    first, second = (-value if judged == "loss" else value), -math.inf if loss is None else -loss
    # A comparison with nan says nothing, and a sort would leave the others in any order.
    return -math.inf if math.isnan(first) else first, -math.inf if math.isnan(second) else second


class BestModel:
    """The ``model`` that validated best so far, if any: ``--test-model best`` tests it.

    It is a part of the checkpoint: a run that goes on elsewhere, where the earlier checkpoints are
    not, tests the same one.
    """

    def __init__(self, *, transductive: bool) -> None:
        self._transductive, self._score = transductive, (-math.inf, -math.inf)
        self.iteration: int | None = None
        self.model: Params = {}

    def offer(self, row: dict[str, Any], iteration: int, model: Params) -> None:
        """Keep a copy of ``model``, validated as ``row`` says, unless an earlier one was better."""
        score = _score(row, transductive=self._transductive)
        if score is not None and (self.iteration is None or score >= self._score):
            copy = {name: tensor.detach().clone() for name, tensor in model.items()}
            self.iteration, self._score, self.model = iteration, score, copy

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it; nothing if there is none yet."""
        if self.iteration is None:
            return {}
        model = {name: tensor.cpu() for name, tensor in self.model.items()}
        return {
            "iteration": self.iteration, "score": list(self._score), "model": model,
            "transductive": self._transductive,
        }  # fmt: skip

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Take back what `state` has returned, onto the device ``home``."""
        if state:
            score = state["score"]
            # A checkpoint of an earlier version has no loss: of equals, the later is taken.
            self._score = (score, -math.inf) if isinstance(score, float) else tuple(score)
            self.iteration = state["iteration"]
            self.model = {name: tensor.to(home) for name, tensor in state["model"].items()}


def content_of(
    run_dir: Path, wanted: str | None, *, transductive: bool, flag: str = "--iteration"
) -> dict[str, Any]:
    """Return the content of a run's checkpoint, or of the model that a record keeps.

    ``wanted`` is its iteration; "best", the one that validated best by the accuracy that is
    ``transductive`` or not; None: with the model that the run tests. A UserError names ``flag``,
    which asks for it, and what there is.
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
        # The best of all of them, kept or not, where it was judged in the same way.
        if wanted is None or last.get("best", {}).get("transductive") == transductive:
            return checkpoint.tested(last)
    kept = checkpoint.numbered_checkpoints(run_dir)
    there_are = f"{run_dir} keeps those of {', '.join(map(str, kept)) or 'none'}"
    if wanted == "best":
        found = best(run_dir, kept, transductive=transductive)[:1]
        if not found:
            raise UserError(f"{flag} best: no kept checkpoint was validated; {there_are}")
    else:
        found = [number for number in kept if str(number) == wanted]
        if not found:
            raise UserError(f"{flag} {wanted}: no checkpoint of it; {there_are}")
    return checkpoint.load(kept[found[0]])


def recorded_content(record: Path) -> dict[str, Any]:
    """Return what a checkpoint would hold of a record; UserError: what is missing or differs."""
    made = read_object(record / "record.json") if (record / "record.json").exists() else {}
    try:
        digest = digest_of(record / RECORDED)
    except OSError as error:
        raise UserError(f"{record / RECORDED}: {error.strerror}: it was recorded") from error
    if made.get("model_sha256", digest) != digest:
        raise UserError(f"{record / RECORDED}: not the file that was recorded: its digest differs")
    # No result of a run that was not tested, and no such value in one of an earlier version.
    tested = directory.read_json(record / "result.json").get("tested_iteration")
    config = directory.read_config(record)
    starts = made.get("starts") or [{}]
    return {
        "model": checkpoint.load_parameters(record / RECORDED)[0],
        "iteration": tested or config.iterations,
        "own_files": starts[-1].get("own_files", {}),
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
            f"{there}; train with --keep-best {count}, and validate as often as it saves"
        )
    return [checkpoint.load(kept[iteration]) for iteration in validated[:count]]
