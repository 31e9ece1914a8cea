"""The inner loop: adapt parameters to one task's support set, differentiably.

Everything here is written for one task and is pure; ``torch.func.vmap`` batches it over tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torchopt
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]

Optimizer: TypeAlias = torchopt.base.GradientTransformation

_NOT_ZERO = 1e-16
"""Stands for an exactly zero gradient; its square is still a normal float32."""


def _differentiable_at_zero(make: Callable[[float], Optimizer]) -> Callable[[float], Optimizer]:
    """Keep an optimizer that divides by √(Σ gradient²) differentiable where a gradient is zero.

    A ReLU that is off for all of a support set has a gradient of exactly zero; √0 has an infinite
    slope, and the meta-gradient would be NaN. The step of such an element stays below 1e-8.
    """

    def init(params: Params) -> tuple[()]:
        return ()

    def update(
        updates: Params, state: tuple[()], *, params: Params | None = None, inplace: bool = True
    ) -> tuple[Params, tuple[()]]:
        return {k: torch.where(g == 0, _NOT_ZERO, g) for k, g in updates.items()}, state

    not_zero = torchopt.base.GradientTransformation(init, update)
    return lambda lr: torchopt.chain(not_zero, make(lr))


OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {
    "sgd": torchopt.sgd,
    "momentum": lambda lr: torchopt.sgd(lr, momentum=0.9),
    "adamax": torchopt.adamax,
    **{
        name: _differentiable_at_zero(getattr(torchopt, name))
        for name in ("adam", "adamw", "radam", "rmsprop", "adagrad", "adadelta")
    },
}


def adapt(
    loss: Callable[[Params], Tensor],
    params: Params,
    *,
    optimizer: Optimizer,
    steps: int,
    order: str = "second",
    rates: Sequence[Params] | None = None,
) -> Params:
    """Take ``steps`` optimizer steps down ``loss`` from ``params``.

    Args:
        loss: The support loss of one task, a scalar function of the parameters.
        params: Named tensors to start from; not changed.
        optimizer: A TorchOpt functional optimizer; its state starts afresh for each task.
        steps: Inner-loop steps; 0 returns ``params``.
        order: "second" differentiates through the gradients (arXiv:1703.03400, equation 1);
            "first" takes them as constants (section 5.2, first-order approximation).
        rates: For each step, what the optimizer's updates are multiplied by, ``{name: […]}`` that
            broadcasts against the parameter; those without a rate, the same ones at every step, are
            not adapted. None: all are, by the updates themselves.

    Returns:
        The adapted parameters, differentiable with respect to ``params`` and ``rates``.
    """
    state = None
    for step in range(steps):
        fixed = params
        moving = params if rates is None else {name: params[name] for name in rates[step]}
        gradients = torch.func.grad(lambda moving, fixed=fixed: loss(fixed | moving))(moving)
        if order == "first":
            gradients = {name: gradient.detach() for name, gradient in gradients.items()}
        if state is None:
            # From gradients, not from params: inside vmap the state must have the task dimension
            # that gradients have and shared initial parameters lack (it is updated in place).
            state = optimizer.init(gradients)
        updates, state = optimizer.update(gradients, state, params=moving, inplace=False)
        if rates is not None:
            updates = {name: rates[step][name] * update for name, update in updates.items()}
        params = fixed | torchopt.apply_updates(moving, updates, inplace=False)
    return params
