"""The optimizers of the inner loop, by name, as TorchOpt has its functional ones."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torchopt

from maml.metagradient.adam import Adam, Moment
from maml.params import Params

Optimizer: TypeAlias = torchopt.base.GradientTransformation


MOMENTUM = 0.9


def _momentum(lr: float) -> Optimizer:
    """Return SGD with momentum; TorchOpt's (0.7.3) keeps apart from its state that it has begun."""

    def init(params: Params) -> Params:
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()}

    def update(
        updates: Params, state: Params, *, params: Params | None = None, inplace: bool = True
    ) -> tuple[Params, Params]:
        seen = {name: state[name] * MOMENTUM + gradient for name, gradient in updates.items()}
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
    **{name: functools.partial(_adam, name) for name in ADAMS},
}


def begun(optimizer: Optimizer | Adam, gradients: Params, second: Moment | None) -> Any:
    """Return an optimizer's state before its first step.

    Args:
        optimizer: One of `OPTIMIZERS`, or of `ADAMS`.
        gradients: The first gradients, whose names and shapes it takes.
        second: What Adam's second moment begins as; None: as nothing seen.
    """
    state = optimizer.init(gradients)
    return state if second is None else state._replace(second=second)
