"""What is minimised and what is measured: classification and regression; and metrics' names."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from maml.errors import UserError


class Objective(NamedTuple):
    """A mean loss over examples, and metrics of the same examples.

    Attributes:
        loss: ``(outputs [E, …], targets [E, …]) → scalar``, the mean over the E examples.
        metrics: ``(outputs [… E, …], targets) → {name: […]}``, of one set or of many at once.
        names: The names of ``metrics``, in order.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Callable[[Tensor, Tensor], dict[str, Tensor]]
    names: tuple[str, ...]


class Given(NamedTuple):
    """A network at hand, by the protocol of `maml.networks`, and what is minimised and measured."""

    network: nn.Module
    objective: Objective


def _accuracy(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Fraction right: logits ``[…, E, N]``, labels ``[…, E]`` int64."""
    # For logits that are no numbers, argmax would answer the first class.
    right = (logits.argmax(-1) == labels) & ~logits.isnan().any(-1)
    return {"accuracy": right.to(logits.dtype).mean(-1)}


def accuracy_of_parts(
    logits: Tensor, labels: Tensor, *, parts: int, classes_first: bool
) -> dict[str, Tensor]:
    """Fraction right of the labels that are not negative: those are there to be ignored.

    Labels ``[…, E, …]`` have ``parts`` dimensions after E, as the words of a sentence are; logits
    have one more: N at the end, or with ``classes_first`` behind E, as torch's cross-entropy.
    """
    if classes_first:
        logits = logits.movedim(-1 - parts, -1)
    logits, labels = logits.flatten(-2 - parts, -2), labels.flatten(-1 - parts)
    right, counted = logits.argmax(-1) == labels, labels >= 0
    return {"accuracy": (right & counted).sum(-1).to(logits.dtype) / counted.sum(-1)}


def _precisions(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Accuracy, which is also precision@1, and the fraction whose label is among the five first."""
    accuracy = _accuracy(logits, labels)["accuracy"]
    first = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    among = (first == labels[..., None]).any(-1).to(logits.dtype).mean(-1)
    return {"accuracy": accuracy, "precision@1": accuracy, "precision@5": among}


def _nothing(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {}


def _mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # which would be made alike without a word
        raise UserError(
            f"a network's outputs are {list(outputs.shape)}, and the targets {list(targets.shape)}"
        )
    # Not F.mse_loss: its backward has no forward derivative (torch 2.15).
    return (outputs - targets).square().mean()


CLASSIFICATION = Objective(F.cross_entropy, _accuracy, ("accuracy",))
RANKED_CLASSIFICATION = Objective(
    F.cross_entropy, _precisions, ("accuracy", "precision@1", "precision@5")
)
REGRESSION = Objective(_mean_squared_error, _nothing, ())


# Rows of metrics.jsonl, result.json and test_tasks.csv are flat: a metric stands there by its name,
# and another number of that name would be lost.
TAKEN = {
    # Rows of metrics.jsonl: of all, of training, and of validations and the test.
    *("iteration", "seconds", "loss"),
    *("tasks_per_second", "skipped", "gradient_norm", "time"),
    *("split", "tasks", "after", "rates"),
    # `Strategy.report`, in rows of training: of all, of collectives, of servers and of observers.
    *("wire_bytes", "reduce_seconds"),
    *("server_seconds", "dropped", "staleness"),
    *("forwards", "requests", "flushed", "missed_tasks"),
    # result.json, also of a record.
    *("ci95", "transductive", "preset", "published", "claim", "source", "deviations", "changed"),
    *("iterations", "tested_iteration", "test_images", "diverged", "ensemble"),
    # evaluations.jsonl: what was asked.
    *("data", "ways", "shots", "eval_queries", "eval_inner_steps"),
    # test_tasks.csv: which task it is.
    *("seed", "index"),
}
BEFORE, AFTER = ("non_transductive_", "transductive_", "ensemble_"), ("_ci95",)
"""What is put before and after each metric's name, for more numbers of it."""


def is_taken(name: str) -> bool:
    """Say whether a run may have a number of its own of that name, or of a part ``time/…``."""
    return name.partition("/")[0] in TAKEN or name.startswith(BEFORE) or name.endswith(AFTER)


def check_metric_names(names: object, what: str) -> None:
    """Refuse metric names that would overwrite something, or that no file can have."""
    what += ": metric_names"
    if not isinstance(names, (tuple, list)):
        raise UserError(f"{what} is of type {type(names).__name__}: make it a tuple of names")
    for name in names:
        # A subclass, as of an enumeration, is written one way here and another way there.
        if type(name) is not str or not name or not name.isprintable() or names.count(name) > 1:
            raise UserError(f"{what} has {name!r}: each is a plain string to print, and there once")
        if is_taken(name):
            raise UserError(
                f"{what} has {name!r}: taken by a run's own numbers, as are all names of "
                "maml/learners/objectives.py: give another name"
            )
