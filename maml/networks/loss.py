"""A network's loss on one set of a task, as a value."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from datasets import addresses
from datasets.tasks import Task
from maml.networks.calls import apply
from maml.params import Params

_OURS = (
    "maml.networks.", "torch.nn.modules.conv", "torch.nn.modules.linear", "torchvision.models.",
    "torch.nn.modules.container", "torch.nn.modules.pooling", "torch.nn.modules.activation",
    "torch.nn.modules.flatten", "torch.nn.modules.padding",
)  # fmt: skip
"""Modules of which our own networks are made."""


@dataclass(frozen=True)
class MiniBatches:
    """A support loss of each step's examples alone: a part of one random order after another.

    ``seed`` is part of the orders' address. A set of no more than ``size`` is seen whole.
    """

    loss: Any  # a `Loss` (`maml.metagradient.problem`)
    seed: int
    size: int

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and its outputs."""
        places = self.places(step, len(task.support_y), task.support_y.device)
        x, y = task.support_x[places], task.support_y[places]
        return self.loss(params, task._replace(support_x=x, support_y=y), step)

    def places(self, step: int, n: int, device: torch.device | None = None) -> Tensor:
        """Return the places ``[size]`` (int64) in a set of ``n`` that step ``step`` sees."""
        size = min(self.size, n)
        places = [self._place(i, n) for i in range(step * size, (step + 1) * size)]
        return torch.tensor(places, device=device)

    def _place(self, i: int, n: int) -> int:
        where = addresses.keys(self.seed, "train", "inner mini-batches", i // n)
        return int(addresses.permutation(where, n)[0, i % n])


@dataclass(frozen=True)
class NetworkLoss:
    """The mean of a loss of a network's outputs over a set of a task, normalised by itself."""

    network: nn.Module
    part: Literal["support", "query"]
    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the network's outputs ``[E, …]``; () if no one tensor."""
        x, y = part_of(task, self.part)
        outputs, _ = apply(self.network, params, x)
        return self.loss(outputs, y), outputs if isinstance(outputs, Tensor) else ()


_IS_OURS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""The answers so far: each step asks."""


def is_ours(network: nn.Module) -> bool:
    """Say whether a network and all its parts are this project's."""
    if network not in _IS_OURS:
        kinds = {type(module).__module__ for module in network.modules()}
        _IS_OURS[network] = all(kind.startswith(_OURS) for kind in kinds)
    return _IS_OURS[network]


def part_of(task: Task, part: str) -> tuple[Tensor, Tensor]:
    """Return the support or the query set of a task, or of a batch of them."""
    if part == "support":
        return task.support_x, task.support_y
    return task.query_x, task.query_y
