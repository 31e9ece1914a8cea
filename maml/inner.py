"""The inner loop: adapt parameters to one task's support set, differentiably.

Everything here is written for one task and is pure; ``torch.func.vmap`` batches it over tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torchopt
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]

OPTIMIZERS: dict[str, Callable[[float], torchopt.base.GradientTransformation]] = {
    "sgd": torchopt.sgd,
    "momentum": lambda lr: torchopt.sgd(lr, momentum=0.9),
    "adam": torchopt.adam,
    "adamw": torchopt.adamw,
    "adamax": torchopt.adamax,
    "radam": torchopt.radam,
    "rmsprop": torchopt.rmsprop,
    "adagrad": torchopt.adagrad,
    "adadelta": torchopt.adadelta,
}


def adapt(
    loss: Callable[[Params], Tensor],
    params: Params,
    *,
    optimizer: torchopt.base.GradientTransformation,
    steps: int,
    order: str = "second",
) -> Params:
    """Take ``steps`` optimizer steps down ``loss`` from ``params``.

    Args:
        loss: The support loss of one task, a scalar function of the parameters.
        params: Named tensors to start from; not changed.
        optimizer: A TorchOpt functional optimizer; its state starts afresh for each task.
        steps: Inner-loop steps; 0 returns ``params``.
        order: "second" differentiates through the gradients (arXiv:1703.03400, equation 1);
            "first" takes them as constants (section 5.2, first-order approximation).

    Returns:
        The adapted parameters, differentiable with respect to ``params``.
    """
    state = None
    for _ in range(steps):
        gradients = torch.func.grad(loss)(params)
        if order == "first":
            gradients = {name: gradient.detach() for name, gradient in gradients.items()}
        if state is None:
            # From gradients, not from params: inside vmap the state must have the task dimension
            # that gradients have and shared initial parameters lack (it is updated in place).
            state = optimizer.init(gradients)
        updates, state = optimizer.update(gradients, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params
