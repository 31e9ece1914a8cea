"""Derivatives of a set's loss, for a batch of tasks that each have their own weights.

What forward-over-reverse meta-gradients are made of: a gradient, and the product of the Hessian
at the same point with a vector. `FunctionLoss` derives both from the loss by ``torch.func``;
another `SetLoss` may compute them faster, and must equal it.

Shape legend: B tasks, E examples of a set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from maml.metagradient.inner import Params


class Gradient(NamedTuple):
    """A set's loss and its first derivative, per task.

    Attributes:
        losses: ``[B]``, the mean loss over the set.
        outputs: ``[B, E, …]``, the network's outputs.
        gradients: ``{name: [B, …]}``, with respect to the weights.
        point: What `SetLoss.hessian_vector` needs to know of where this was taken.
    """

    losses: Tensor
    outputs: Tensor
    gradients: Params
    point: Any


class SetLoss(Protocol):
    """The mean loss of a set as a function of the network's weights, for B tasks at once.

    Weights, gradients and vectors are in coordinates of its own: the same numbers under names and
    shapes that suit it, so that arithmetic element by element means the same in them.
    """

    def enter(self, weights: Params) -> Params:
        """Return the network's weights ``{name: […]}`` in the loss's own coordinates."""

    def leave(self, gradients: Params) -> Params:
        """Return gradients in its own coordinates by the network's names ``{name: […]}``."""

    def gradient(self, weights: Params, x: Tensor, y: Tensor, *, again: bool) -> Gradient:
        """Return losses, outputs and gradients, in its own coordinates.

        Args:
            weights: ``{name: [B, …]}``; shared weights are expanded over B (stride 0).
            x: ``[B, E, …]``.
            y: ``[B, E, …]``.
            again: Whether `hessian_vector` will be asked for at this point.
        """

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """Return the Hessian at ``point`` times ``vector {name: [B, …]}``.

        ``{name: [B, …]}``; with ``total``, its sum over tasks, ``{name: […]}``. The point is then
        used up, unless it will be asked for ``again``.
        """


class FunctionLoss:
    """Derivatives of ``loss(weights, x, y) → (loss, outputs)``, written for one task."""

    def __init__(self, loss: Callable[[Params, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._gradient = torch.func.grad_and_value(loss, has_aux=True)

    def enter(self, weights: Params) -> Params:
        """See `SetLoss.enter`: the network's own."""
        return weights

    def leave(self, gradients: Params) -> Params:
        """See `SetLoss.leave`."""
        return gradients

    def gradient(self, weights: Params, x: Tensor, y: Tensor, *, again: bool) -> Gradient:
        """See `SetLoss.gradient`."""
        weights, dims = _shared(weights)
        batched = torch.func.vmap(self._gradient, in_dims=(dims, 0, 0))
        gradients, (losses, outputs) = batched(weights, x, y)
        return Gradient(losses, outputs, gradients, (weights, dims, x, y) if again else None)

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `SetLoss.hessian_vector`: the gradient's derivative along ``vector``."""
        weights, dims, x, y = point

        def along(weights: Params, vector: Params, x: Tensor, y: Tensor) -> Params:
            return torch.func.jvp(lambda at: self._gradient(at, x, y)[0], (weights,), (vector,))[1]

        products = torch.func.vmap(along, in_dims=(dims, 0, 0, 0))(weights, vector, x, y)
        return {name: p.sum(0) for name, p in products.items()} if total else products


def of_each_task(weights: Params, n_tasks: int) -> Params:
    """Return weights that B tasks share as ``{name: [B, …]}``, without a copy (stride 0)."""
    return {name: tensor.expand(n_tasks, *tensor.shape) for name, tensor in weights.items()}


def _shared(weights: Params) -> tuple[Params, int | None]:
    """Drop the task dimension of weights that all tasks share, and say whether it was dropped."""
    if all(tensor.stride(0) == 0 for tensor in weights.values()):
        # One convolution for all tasks, in place of a grouped one.
        return {name: tensor[0] for name, tensor in weights.items()}, None
    return weights, 0
