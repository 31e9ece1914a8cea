"""A network's loss on one set of a task, as an immutable object."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets import accelerator, addresses
from datasets.tasks import Task
from maml.networks.calls import alone_with, apply
from maml.networks.ordinary import swapped, tensors
from maml.ops.instead import instead
from maml.params import Params, of_kind, without_prefix

CPU = torch.device("cpu")
_OURS = (
    "maml.networks.", "torch.nn.modules.conv", "torch.nn.modules.linear", "torchvision.models.",
    "torch.nn.modules.container", "torch.nn.modules.pooling", "torch.nn.modules.activation",
    "torch.nn.modules.flatten", "torch.nn.modules.padding",
)  # fmt: skip
"""Prefixes of the Python modules that our own networks and their layers come from."""


@dataclass(frozen=True)
class MiniBatches:
    """A support loss on mini-batches: each step takes the next part of a random order of the set.

    More orders follow, addressed by ``seed``. A set of at most ``size`` examples is used whole.
    """

    loss: Any  # a `Loss` (`maml.metagradient.problem`)
    seed: int
    size: int

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and its outputs."""
        some = pytree.tree_leaves(task.support_y)[0]
        places = self.places(step, len(some), some.device)
        x, y = pytree.tree_map(lambda part: part[places], (task.support_x, task.support_y))
        return self.loss(params, task._replace(support_x=x, support_y=y), step)

    def places(self, step: int, n: int, device: torch.device = CPU) -> Tensor:
        """Return the indices ``[size]`` (int64) of a set of ``n`` that step ``step`` uses."""
        size = min(self.size, n)
        places = [self._place(i, n) for i in range(step * size, (step + 1) * size)]
        return accelerator.sent(torch.tensor(places, device=CPU), device)

    def _place(self, i: int, n: int) -> int:
        where = addresses.keys(self.seed, "train", "inner mini-batches", i // n)
        return int(addresses.permutation(where, n)[0, i % n])


CRITERION = "criterion."
"""The prefix of the names of a loss's parameters: the attribute of a learner."""


def of_loss(meta_params: Params) -> Params:
    """Return those of a learner's meta-parameters that its loss reads, by their own names."""
    return {name: p for name, p in meta_params.items() if name.startswith(CRITERION)}


class LearnedLoss(nn.Module):
    """A learner's ``criterion`` with parameters that learn, or with another ``inner`` loss."""

    def __init__(
        self, loss: Callable[..., Tensor], inner: Callable[..., Tensor] | None = None
    ) -> None:
        """``inner``: what the inner loop descends; None: ``loss``. Parameters of modules learn."""
        super().__init__()
        self.loss, self.inner = loss, inner

    def forward(self, outputs: Any, y: Any, part: str = "query") -> Tensor:
        """Return a set's loss by the modules' own parameters."""
        return (self.loss if part == "query" else self.inner or self.loss)(outputs, y)

    def at(self, params: Params, part: str) -> Callable[[Any, Any], Tensor]:
        """Return a set's loss as a function, by those of ``params`` that are its own."""
        known = tensors(self)
        given = without_prefix(params, CRITERION)
        own = {name: of_kind(tensor, known[name]) for name, tensor in given.items()}

        def loss(outputs: Any, y: Any) -> Tensor:
            # Not torch's functional_call, which breaks a module that has two names.
            with alone_with(self), swapped(self, dict(own)):
                return self(outputs, y, part)

        return loss


@dataclass(frozen=True)
class NetworkLoss:
    """A network's loss on one set of a task, normalised by the statistics of that set."""

    network: nn.Module
    part: Literal["support", "query"]
    loss: Callable[[Tensor, Tensor], Tensor]
    calls_instead: ClassVar[bool] = True

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the outputs ``[E, …]``; () if they are not one tensor."""
        x, y = part_of(task, self.part)
        outputs, _ = apply(self.network, params, x)
        loss = self.loss
        if isinstance(loss, LearnedLoss):
            loss = loss.at(params, self.part)
        with instead():
            value = loss(outputs, y)
        return value, outputs if isinstance(outputs, Tensor) else ()


_IS_OURS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Cached results of `is_ours`, because each step calls it."""


def is_ours(network: nn.Module) -> bool:
    """Return whether a network and all its parts come from the modules in `_OURS`."""
    if network not in _IS_OURS:
        kinds = {type(module).__module__ for module in network.modules()}
        _IS_OURS[network] = all(kind.startswith(_OURS) for kind in kinds)
    return _IS_OURS[network]


def part_of(task: Task, part: str) -> tuple[Tensor, Tensor]:
    """Return the support or the query set of a task, or of a batch of them."""
    if part == "support":
        return task.support_x, task.support_y
    return task.query_x, task.query_y
