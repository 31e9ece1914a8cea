"""Σ outer loss as a node of an autograd graph that may reach over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maml.worker import Share


class OuterLoss(torch.autograd.Function):
    """Σ outer loss as a function of the meta-parameters, its gradient computed on the way.

    The gradient is taken at once by `Worker.meta_gradient`, in batches of bounded memory, and
    scaled in ``backward``: exact, since the sum is all that leaves the worker. A call in flight
    therefore holds one gradient, not the graphs of its tasks.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Share], names: Any, *leaves: Tensor) -> Tensor:
        """Return ``[1 + M + 1]`` on the CPU: Σ loss, Σ metrics and the count of ``compute()``."""
        share = compute()
        ctx.save_for_backward(*(share.gradients[name].cpu() for name in names))
        return torch.cat([share.totals, share.totals.new_tensor([share.n_tasks])]).cpu()

    @staticmethod
    def backward(ctx: Any, *from_totals: Tensor) -> Any:
        """Scale the gradients that were kept."""
        # Only the loss, element 0, is differentiable; metrics and the count are constants.
        scale = from_totals[0][0]
        return (None, None, *(scale * gradient for gradient in ctx.saved_tensors))
