"""A network's loss at weights that are made of a problem's parameters, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from datasets.tasks import Task
from maml.networks.loss import NetworkLoss
from maml.networks.norms import tensors
from maml.params import Params


@dataclass(frozen=True)
class ModulatedLoss:
    """A network's loss on one set, where what adapts is no weight of it, but changes some.

    Attributes:
        plain: The loss of the network's weights.
        modulated: ``params {name: […]} → weights {name: […]}``, the network's among them, of all
            that the problem has; differentiable, and of one task.
    """

    plain: NetworkLoss
    modulated: Callable[[Params], Params]

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self.plain.network

    @property
    def kind(self) -> tuple[Any, ...]:
        """See `NetworkLoss.kind`."""
        # Not the object whose method it is: it holds the network.
        return *self.plain.kind, getattr(self.modulated, "__func__", self.modulated)

    def weights(self, params: Params) -> Params:
        """Return the network's weights, by its own names."""
        made = self.modulated(params)
        return {name: made[name] for name in tensors(self.network)}

    def __call__(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the network's outputs ``[E, …]``."""
        return self.plain(self.weights(params), task, step)
