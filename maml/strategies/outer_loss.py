"""Σ outer loss as a node of an autograd graph that may reach over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maml.strategies.packing import Packing
from maml.worker import Share


class OuterLoss(torch.autograd.Function):
    """Σ outer loss as a function of the flat meta-parameters, its gradient computed on the way.

    The gradient is taken at once by `Worker.meta_gradient`, in batches of bounded memory, and
    scaled in ``backward``: exact, since the sum is all that leaves the worker. A call in flight
    therefore holds one gradient, not the graphs of its tasks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], Share],
        packing: Packing,
        leaf: Tensor,
    ) -> Tensor:
        """Return ``[1 + M + 1]`` on the CPU: Σ loss, Σ metrics and the count of ``compute()``.

        ``leaf [P]``: the parameters that it is a function of.
        """
        packed = packing.share(compute()).cpu()
        ctx.save_for_backward(packed[: packing.n_params])
        # A copy: a view would take all it is a view of with it.
        return packed[packing.n_params :].clone()

    @staticmethod
    def backward(ctx: Any, *from_totals: Tensor) -> Any:
        """Scale the gradient that was kept."""
        # Only the loss, element 0, is differentiable; metrics and the count are constants.
        (gradient,) = ctx.saved_tensors
        return None, None, from_totals[0][0] * gradient
