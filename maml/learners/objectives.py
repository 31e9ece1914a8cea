"""What is minimised and what is measured: classification and regression."""

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
