"""The optimizers of the inner loop, by name, differentiable: TorchOpt's functional ones, and Adam.

TorchOpt's Adamax has ε = 1e-6 where Adam has 1e-8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torchopt

from maml.metagradient.adam import NOT_ZERO, Adam, Moment
from maml.params import Params

Optimizer: TypeAlias = torchopt.base.GradientTransformation


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
        return {k: torch.where(g == 0, NOT_ZERO, g) for k, g in updates.items()}, state

    not_zero = torchopt.base.GradientTransformation(init, update)
    return lambda lr: torchopt.chain(not_zero, make(lr))


def _momentum(lr: float, beta: float = 0.9) -> Optimizer:
    """Return SGD with momentum; TorchOpt's (0.7.3) keeps apart from its state that it has begun."""

    def init(params: Params) -> Params:
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()}

    def update(
        updates: Params, state: Params, *, params: Params | None = None, inplace: bool = True
    ) -> tuple[Params, Params]:
        seen = {name: state[name] * beta + gradient for name, gradient in updates.items()}
        return {name: tensor * -lr for name, tensor in seen.items()}, seen

    return torchopt.base.GradientTransformation(init, update)


ADAMS: dict[str, Callable[[float], Adam]] = {
    "adam": Adam,
    "adamw": lambda lr: Adam(lr, weight_decay=0.01),
    "adam0": lambda lr: Adam(lr, beta1=0.0),
}


def _adam(name: str, lr: float) -> Optimizer:
    return ADAMS[name](lr).transformation()


OPTIMIZERS: dict[str, Callable[[float], Optimizer]] = {
    "sgd": torchopt.sgd,
    "momentum": _momentum,
    "adamax": torchopt.adamax,
    **{
        name: _differentiable_at_zero(getattr(torchopt, name))
        for name in ("radam", "rmsprop", "adagrad", "adadelta")
    },
    **{name: functools.partial(_adam, name) for name in ADAMS},
}


def begun(optimizer: Optimizer, gradients: Params, second: Moment | None) -> Any:
    """Return an optimizer's state before its first step.

    Args:
        optimizer: One of `OPTIMIZERS`.
        gradients: The first gradients, whose names and shapes it takes.
        second: What Adam's second moment begins as; None: as nothing seen.
    """
    state = optimizer.init(gradients)
    return state if second is None else state._replace(second=second)
