"""Adam and AdamW for the inner loop, with exact bias corrections.

TorchOpt (0.7.3) computes 1 − βᵗ in float32, whatever the dtype of the parameters. In float64 that
moves the meta-gradient of three inner steps by 1e-6 to 1e-3 of itself. Here t is a number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torchopt

from maml.params import Params


class AdamState(NamedTuple):
    """What Adam remembers.

    Attributes:
        t: Steps taken.
        m: The mean of gradients, ``{name: […]}``.
        v: The mean of their squares.
    """

    t: int
    m: Params
    v: Params


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
        return AdamState(0, *({n: torch.zeros_like(p) for n, p in params.items()} for _ in "mv"))

    def update(
        updates: Params, state: AdamState, *, params: Params | None = None, inplace: bool = True
    ) -> tuple[Params, AdamState]:
        t = state.t + 1
        m = {n: beta1 * state.m[n] + (1 - beta1) * g for n, g in updates.items()}
        v = {n: beta2 * state.v[n] + (1 - beta2) * g.square() for n, g in updates.items()}
        of_m, of_v = 1 - beta1**t, 1 - beta2**t
        steps = {n: -lr * (m[n] / of_m) / ((v[n] / of_v).sqrt() + eps) for n in updates}
        if weight_decay:
            assert params is not None
            steps = {n: step - lr * weight_decay * params[n] for n, step in steps.items()}
        return steps, AdamState(t, m, v)

    return torchopt.base.GradientTransformation(init, update)
