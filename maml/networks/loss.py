"""A network's loss on one set of a task, as a value: what compiled kernels know is told by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from datasets.tasks import Task
from maml.execution import precision
from maml.networks.statistics import Statistics
from maml.params import Params

_OURS = (
    "maml.networks.", "torch.nn.modules.conv", "torch.nn.modules.linear", "torchvision.models.",
    "torch.nn.modules.container", "torch.nn.modules.pooling", "torch.nn.modules.activation",
)  # fmt: skip
"""Modules of which our own networks are made."""


@dataclass(frozen=True)
class NetworkLoss:
    """The mean of a loss of a network's outputs over a task's support or query set.

    The set is normalised by its own batch statistics.

    Attributes:
        network: A module by the protocol of `maml.networks`.
        part: Which set.
        loss: ``(outputs [E, …], targets [E, …]) → scalar``.
        precision: ``--precision``.
    """

    network: nn.Module
    part: Literal["support", "query"]
    loss: Callable[[Tensor, Tensor], Tensor]
    precision: str = "float32"

    @property
    def theirs(self) -> bool:
        """Whether the network, or a part of it, is not this project's."""
        modules = self.network.modules()
        return not all(type(module).__module__.startswith(_OURS) for module in modules)

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the network's outputs ``[E, …]``."""
        x, y = part_of(task, self.part)
        outputs, _ = apply(self.network, params, x, precision_=self.precision)
        return self.loss(outputs, y), outputs


def part_of(task: Task, part: str) -> tuple[Tensor, Tensor]:
    """Return the support or the query set of a task, or of a batch of them."""
    if part == "support":
        return task.support_x, task.support_y
    return task.query_x, task.query_y


def apply(
    network: nn.Module,
    params: Params,
    x: Tensor,
    statistics: Statistics | None = None,
    *,
    precision_: str = "float32",
) -> tuple[Tensor, Statistics]:
    """Apply ``network`` with ``params`` (its own names) to ``x [E, …]``.

    Not for concurrent threads on one module: ``functional_call`` swaps its tensors while it runs.
    """
    with precision.products(precision_):
        outputs, used = torch.func.functional_call(network, params, (x, statistics))
    # What is computed from the outputs, a loss to begin with, is not rounded.
    return outputs.to(x.dtype), used
