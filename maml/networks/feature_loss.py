"""A loss of a network's features on a whole task, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from datasets.tasks import Task
from maml.networks.loss import apply
from maml.networks.norms import tensors
from maml.params import Params


@dataclass(frozen=True)
class FeatureLoss:
    """The mean of a loss of what a classifier says of a task's queries, by features.

    The classifier is made of the support set's features. Both sets go through the network as one
    batch, and are normalised together.

    Attributes:
        network: A module by the protocol of `maml.networks`, whose outputs are features.
        classifier: ``(params, support features [S, F], their classes [S, N] as zeros and ones,
            query features [E, F]) → outputs [E, N]``; it may read parameters of its own.
        ways: N.
        loss: ``(outputs [E, N], targets [E]) → scalar``.
        precision: ``--precision``.
    """

    network: nn.Module
    classifier: Callable[[Params, Tensor, Tensor, Tensor], Tensor]
    ways: int
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: str = "float32"

    @property
    def kind(self) -> tuple[Any, ...]:
        """See `NetworkLoss.kind`."""
        # Not the object whose method it is: it holds the network.
        return getattr(self.classifier, "__func__", self.classifier), self.ways, self.loss

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the outputs ``[E, N]``."""
        own = {name: params[name] for name in tensors(self.network)}
        features, _ = apply(self.network, own, both(task), precision_=self.precision)
        outputs = self.of_features(params, features, task)
        return self.loss(outputs, task.query_y), outputs

    def of_features(self, params: Params, features: Tensor, task: Task) -> Tensor:
        """Return the classifier's outputs, of features ``[S + E, F]`` of `both` sets."""
        support, query = features.split([len(task.support_x), len(task.query_x)])
        of_classes = one_hot(task.support_y, self.ways, support)
        outputs = self.classifier(params, support, of_classes, query)
        if outputs.shape != (len(query), self.ways):
            raise ValueError(
                f"logits returns {list(outputs.shape)}; it must be [{len(query)}, {self.ways}], a "
                "row a query and a column a class"
            )
        return outputs


def both(tasks: Task, dim: int = 0) -> Tensor:
    """Return the support and the query set of a task, or of a batch of them, as one set."""
    return torch.cat([tasks.support_x, tasks.query_x], dim)


def one_hot(labels: Tensor, ways: int, like: Tensor) -> Tensor:
    """Return labels ``[S]`` as ``[S, N]`` zeros and ones, of the dtype of ``like``."""
    return (labels[:, None] == torch.arange(ways, device=like.device)).to(like.dtype)
