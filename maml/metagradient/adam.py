"""Adam and AdamW for the inner loop, with exact bias corrections.

TorchOpt (0.7.3) computes 1 − βᵗ in float32, whatever the dtype of the parameters. In float64 that
moves the meta-gradient of three inner steps by 1e-6 to 1e-3 of itself. Here it is a number
of Python, or for a moment that is another's a tensor of the parameters' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torchopt
from torch import Tensor

from maml.params import Params


class Moment(NamedTuple):
    """A moment of the gradients seen, of which older ones count β times as much as newer ones.

    Attributes:
        total: ``{name: […]}``; zero before the first gradient.
        weight: What the gradients in it count together: 1 − βᵗ after t of them; a number, or a
            tensor ``[]`` where the moment is another's, who has averaged it.
        kept: How much is left of the total that it began with: βᵗ after t gradients.
    """

    total: Params
    weight: float | Tensor = 0.0
    kept: float = 1.0

    def with_new(self, gradients: Params, beta: float) -> Moment:
        """Return the moment with one more gradient, or its square."""
        total = {
            n: torch.add(g * (1 - beta), self.total[n], alpha=beta) for n, g in gradients.items()
        }
        return Moment(total, beta * self.weight + (1 - beta), beta * self.kept)

    def mean(self) -> Params:
        """Return the mean of what was seen: the bias correction."""
        return {name: tensor / self.weight for name, tensor in self.total.items()}


class AdamState(NamedTuple):
    """What Adam remembers: the first and the second moment of the gradients."""

    first: Moment
    second: Moment


def adam(
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torchopt.base.GradientTransformation:
    """Return Adam (arXiv:1412.6980, algorithm 1), as TorchOpt has its optimizers.

    With ``weight_decay`` it is AdamW, decoupled (arXiv:1711.05101, algorithm 2).
    """

    def init(params: Params) -> AdamState:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        return AdamState(Moment(zeros), Moment(zeros))

    def update(
        updates: Params, state: AdamState, *, params: Params | None = None, inplace: bool = True
    ) -> tuple[Params, AdamState]:
        first = state.first.with_new(updates, beta1) if beta1 else Moment(updates, 1.0)
        second = state.second.with_new({n: g.square() for n, g in updates.items()}, beta2)
        m, v = first.mean() if beta1 else updates, second.mean()
        steps = {n: -lr * m[n] / (v[n].sqrt() + eps) for n in updates}
        if weight_decay:
            assert params is not None
            steps = {n: step - lr * weight_decay * params[n] for n, step in steps.items()}
        return steps, AdamState(first, second)

    return torchopt.base.GradientTransformation(init, update)
