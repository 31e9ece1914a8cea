"""A network's loss on one set of a task, as a value."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from datasets import addresses
from datasets.tasks import Task
from maml.networks import checkpointed
from maml.networks.alone import alone_with
from maml.networks.statistics import Statistics
from maml.params import Params

_OURS = (
    "maml.networks.", "torch.nn.modules.conv", "torch.nn.modules.linear", "torchvision.models.",
    "torch.nn.modules.container", "torch.nn.modules.pooling", "torch.nn.modules.activation",
    "torch.nn.modules.flatten", "torch.nn.modules.padding",
)  # fmt: skip
"""Modules of which our own networks are made."""


@dataclass(frozen=True)
class MiniBatches:
    """Which examples of a set each inner step sees: a part of one random order after another.

    ``seed`` is part of the orders' address. A set of no more than ``size`` is seen whole.
    """

    seed: int
    size: int

    def places(self, step: int, n: int, device: torch.device | None = None) -> Tensor:
        """Return the places ``[size]`` (int64) in a set of ``n`` that step ``step`` sees."""
        size = min(self.size, n)
        places = [self._place(i, n) for i in range(step * size, (step + 1) * size)]
        return torch.tensor(places, device=device)

    def _place(self, i: int, n: int) -> int:
        where = addresses.keys(self.seed, "train", "inner mini-batches", i // n)
        return int(addresses.permutation(where, n)[0, i % n])


@dataclass(frozen=True)
class LossOfBatches:
    """A support loss of whole tasks as one of each step's examples alone; None: of all."""

    loss: Callable[[Params, Task, int], tuple[Tensor, Tensor]]
    batches: MiniBatches | None

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and its outputs."""
        if self.batches is not None:
            places = self.batches.places(step, len(task.support_y), task.support_y.device)
            x, y = task.support_x[places], task.support_y[places]
            task = task._replace(support_x=x, support_y=y)
        return self.loss(params, task, step)


@dataclass(frozen=True)
class NetworkLoss:
    """The mean of a loss of a network's outputs over a set of a task, normalised by itself.

    ``batches``: which of the examples each step sees; None: all.
    """

    network: nn.Module
    part: Literal["support", "query"]
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: MiniBatches | None = None

    @property
    def theirs(self) -> bool:
        """Whether the network, or a part of it, is not this project's."""
        return not is_ours(self.network)

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the network's outputs ``[E, …]``."""
        x, y = part_of(task, self.part)
        if self.batches is not None:
            places = self.batches.places(step, len(y), y.device)
            x, y = x[places], y[places]
        outputs, _ = apply(self.network, params, x)
        return self.loss(outputs, y), outputs


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


def apply(
    network: nn.Module, params: Params, x: Tensor, statistics: Statistics | None = None
) -> tuple[Tensor, Statistics]:
    """Apply ``network`` with ``params`` (its own names) to ``x [E, …]``.

    What the network writes into its buffers is gone after the call: tasks share nothing. Threads
    that call one network wait for each other.
    """
    with alone_with(network):
        buffers = {
            name: buffer.clone() for name, buffer in network.named_buffers() if name not in params
        }
        tied: dict[str, str] = getattr(network, "tied", {})
        buffers |= {name: params[own] for name, own in tied.items() if own in params}
        tensors = {**buffers, **params}
        # A layer in two places has its tensors once, by one name. Torch's own ties would swap them
        # twice, and leave the second one's tensors in the network.
        with checkpointed.calling(network, tensors):
            outputs, used = torch.func.functional_call(
                network, tensors, (x, statistics), tie_weights=False
            )
    # What is computed from the outputs, a loss to begin with, is as exact as the parameters.
    # Examples do not say how exact: they may be integers.
    exact = next((p.dtype for p in params.values() if p.is_floating_point()), outputs.dtype)
    return outputs.to(exact), used
