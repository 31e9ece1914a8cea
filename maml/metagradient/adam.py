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

NOT_ZERO = 1e-16
"""Stands for an exactly zero gradient; its square is still a normal float32."""


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

    def counted(self, beta: float) -> Moment:
        """Return the weights of the moment with one more gradient, and a total to be filled."""
        return Moment({}, beta * self.weight + (1 - beta), beta * self.kept)


class AdamState(NamedTuple):
    """What Adam remembers: the first and the second moment of the gradients."""

    first: Moment
    second: Moment


class Adam(NamedTuple):
    """Adam (arXiv:1412.6980, algorithm 1); with ``weight_decay`` AdamW, decoupled
    (arXiv:1711.05101, algorithm 2).

    Its derivative stays finite where a gradient is exactly zero, as that of a ReLU which is off for
    all of a support set: √0 has an infinite slope. The step of such an element stays below 1e-8.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def transformation(self) -> torchopt.base.GradientTransformation:
        """Return it as TorchOpt has its optimizers."""
        return torchopt.base.GradientTransformation(self.init, self.update)

    def init(self, params: Params) -> AdamState:
        """Return the state before the first step."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        return AdamState(Moment(zeros), Moment(zeros))

    def update(
        self, updates: Params, state: AdamState, *, params: Params | None = None,
        inplace: bool = True,
    ) -> tuple[Params, AdamState]:  # fmt: skip
        """Return what gradients make of weights, to be added to them, and the state after."""
        after = AdamState(state.first.counted(self.beta1), state.second.counted(self.beta2))
        steps = {}
        # Name by name: what is computed on the way is of one tensor alone.
        for name, gradient in updates.items():
            m, v, mean, root = self._seen(name, gradient, state, after)
            after.first.total[name], after.second.total[name] = m, v
            steps[name] = -self.lr * mean / (root + self.eps)
            if self.weight_decay:
                assert params is not None
                steps[name] = steps[name] - self.lr * self.weight_decay * params[name]
        return steps, after

    def _seen(
        self, name: str, gradient: Tensor, state: AdamState, after: AdamState
    ) -> tuple[Tensor, ...]:
        """Return both totals with a gradient, the first's mean and the root of the second's."""
        g = torch.where(gradient == 0, NOT_ZERO, gradient)
        m = g
        if self.beta1:
            m = torch.add(g * (1 - self.beta1), state.first.total[name], alpha=self.beta1)
        v = torch.add(g.square() * (1 - self.beta2), state.second.total[name], alpha=self.beta2)
        mean = m / after.first.weight if self.beta1 else g
        return m, v, mean, (v / after.second.weight).sqrt()

    def pull_back(
        self, name: str, gradient: Tensor, state: AdamState, along: Tensor,
        of_state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Pull cotangents of a tensor's step and of its totals back to its gradient and totals.

        Args:
            name: Of the tensor.
            gradient: What `update` was given.
            state: Likewise.
            along: The cotangent of the step, but for the decay.
            of_state: Those of the totals after the step; None: zero.
        """
        after = AdamState(state.first.counted(self.beta1), state.second.counted(self.beta2))
        _, _, mean, root = self._seen(name, gradient, state, after)
        below = root + self.eps
        of_m = (along / below).mul_(-self.lr)
        of_v = (of_m * mean).div_(below).div_(root).mul_(-0.5 / after.second.weight)
        of_m.div_(after.first.weight)
        if of_state is not None:
            of_m.add_(of_state[0])
            of_v.add_(of_state[1])
        of_gradient = (of_v * gradient).mul_(2 * (1 - self.beta2)).add_(of_m, alpha=1 - self.beta1)
        # What stands for zero is a constant.
        of_gradient.masked_fill_(gradient == 0, 0.0)
        return of_gradient, (of_m.mul_(self.beta1), of_v.mul_(self.beta2))
