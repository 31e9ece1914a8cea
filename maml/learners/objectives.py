"""Losses and metrics of classification and regression, and the check of metric names."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from maml.errors import UserError
from maml.learners.rates import Rates


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
    """An existing network, with the protocol of `maml.networks`, its objective, and inner rates."""

    network: nn.Module
    objective: Objective
    rates: Rates | None = None


class Predictions(NamedTuple):
    """A network's outputs for the queries of B tasks: ``[B, E, …]`` each.

    Attributes:
        transductive: Normalised by the whole query set's statistics, as in MAML's released code.
            None: a single query has no such statistics.
        non_transductive: Normalised by the support set's statistics: no output depends on other
            queries. The same object as ``transductive`` where nothing is normalised.
    """

    transductive: Tensor | None
    non_transductive: Tensor


def accuracy(
    logits: Tensor, labels: Tensor, *, parts: int = 0, classes_first: bool = False
) -> dict[str, Tensor]:
    """Return the fraction right of the labels, but ignore negative labels.

    Labels ``[…, E, …]`` have ``parts`` dimensions after E, for example the words of a sentence.
    Logits also have N: at the end, or with ``classes_first`` after E as in torch's cross-entropy.
    """
    if classes_first:
        logits = logits.movedim(-1 - parts, -1)
    logits, labels = logits.flatten(-2 - parts, -2), labels.flatten(-1 - parts)
    counted = labels >= 0
    # NaN logits count as wrong, because argmax returns a class for them too.
    right = (logits.argmax(-1) == labels) & counted & ~logits.isnan().any(-1)
    return {"accuracy": right.sum(-1).to(logits.dtype) / counted.sum(-1)}


def classes_of(outputs: Any, y: Tensor, default: bool) -> int:
    """Return the number of classes in outputs for labels ``y [E, …]``; 0: they are not classes.

    Classes are the last dimension. The ``default`` loss needs them in the second, or this raises.
    """
    if not isinstance(outputs, Tensor):
        if default:
            what = type(outputs).__name__
            raise UserError(f"the module returns a {what}; give loss=, a function of it and y")
        return 0
    shape = list(outputs.shape)
    classes = shape.pop(1 if default else -1) if len(shape) > 1 else 0
    if default and shape != list(y.shape):
        raise UserError(
            f"task 0: query_y is {list(y.shape)}, and outputs are {list(outputs.shape)}; the loss "
            "that is the default takes [E] and [E, N], or [E, …] and [E, N, …]; give loss="
        )
    # We do not take a single output as classes: it may be a logit or a count.
    return classes if shape == list(y.shape) and (classes > 1 or default) else 0


def for_targets(
    objective: Objective, classes: int, parts: int, *, classes_first: bool = False
) -> Objective:
    """Return an objective that measures the `accuracy` of ``parts``, or nothing without classes."""
    if not classes:
        return objective._replace(metrics=_nothing, names=())
    of_parts = functools.partial(accuracy, parts=parts, classes_first=classes_first)
    return objective._replace(metrics=of_parts)


def _precisions(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return accuracy (also as precision@1) and precision@5: the label is among the top five."""
    found = accuracy(logits, labels)["accuracy"]
    first = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    among = (first == labels[..., None]).any(-1).to(logits.dtype).mean(-1)
    return {"accuracy": found, "precision@1": found, "precision@5": among}


def _nothing(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {}


def _mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # torch would broadcast them silently
        raise UserError(
            f"a network's outputs are {list(outputs.shape)}, and the targets {list(targets.shape)}"
        )
    # Not F.mse_loss: its backward has no forward derivative (torch 2.15).
    return (outputs - targets).square().mean()


CLASSIFICATION = Objective(F.cross_entropy, accuracy, ("accuracy",))
RANKED_CLASSIFICATION = Objective(
    F.cross_entropy, _precisions, ("accuracy", "precision@1", "precision@5")
)
REGRESSION = Objective(_mean_squared_error, _nothing, ())


# Rows of metrics.jsonl, result.json and test_tasks.csv are flat: each metric stands under its name,
# so another number with the same name would be lost.
TAKEN = {
    # metrics.jsonl: all rows; rows of training; rows of validations and of the test.
    *("iteration", "seconds", "loss"),
    *("tasks_per_second", "skipped", "gradient_norm", "time"),
    *("split", "tasks", "after", "rates"),
    # `Strategy.report`, in rows of training: all and collectives; servers; observers.
    *("wire_bytes", "reduce_seconds"),
    *("server_seconds", "dropped", "staleness"),
    *("forwards", "requests", "flushed", "requests_per_second", "action_ms", "missed_tasks"),
    # result.json, also of a record.
    *("ci95", "interval95", "transductive", "preset", "published", "claim", "source"),
    *(
        "deviations",
        "changed",
        "iterations",
        "tested_iteration",
        "test_images",
        "diverged",
        "ensemble",
    ),
    # evaluations.jsonl: the options of the evaluation.
    *("data", "images", "ways", "shots", "eval_queries", "eval_inner_steps"),
    # test_tasks.csv: which task it is.
    *("seed", "index"),
}
BEFORE, AFTER = ("non_transductive_", "transductive_", "ensemble_"), ("_ci95",)
"""Prefixes and suffixes of a metric's name, for further numbers of the same metric."""


def is_taken(name: str) -> bool:
    """Return whether a run itself may use this name, or its part before ``/`` (``time/…``)."""
    return name.partition("/")[0] in TAKEN or name.startswith(BEFORE) or name.endswith(AFTER)


def check_metric_names(names: object, what: str) -> None:
    """Raise `UserError` for metric names that are taken, or that a file cannot store."""
    what += ": metric_names"
    if not isinstance(names, (tuple, list)):
        raise UserError(f"{what} is of type {type(names).__name__}: make it a tuple of names")
    for name in names:
        # Not a subclass of str: files would show, for example, an enum member in different ways.
        if type(name) is not str or not name or not name.isprintable() or names.count(name) > 1:
            raise UserError(f"{what} has {name!r}: give printable strings, each once")
        if is_taken(name):
            raise UserError(
                f"{what} has {name!r}: taken by a run's own numbers, as are all names of "
                "maml/learners/objectives.py: give another name"
            )
