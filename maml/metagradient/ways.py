"""Whether two ways of differentiating a problem agree: they share nothing but the losses.

A loss may reach operations whose second derivative torch has wrong. Our own code writes those out
(`maml.execution.norms`), but scripted functions and ``torch.ops`` pass it by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.metagradient.differentiate import Way, meta_gradient
from maml.metagradient.problem import Problem
from maml.params import Params


def disagreement(
    problem_of: Callable[[Params], Problem], meta_params: Params, tasks: Any
) -> float | None:
    """Return how far reverse mode and forward over reverse are apart, in float64.

    Args:
        problem_of: As of `differentiate.meta_gradient`.
        meta_params: ``{name: […]}``.
        tasks: B tasks.

    Returns:
        The norm of the difference over that of the gradient. None where nothing can be said: one of
        them cannot be had in float64, or two calls differ by chance, as with dropout.
    """

    def double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    params, tasks = pytree.tree_map(double, (meta_params, tasks))

    def by(way: Way) -> Tensor:
        found = meta_gradient(problem_of, params, tasks, way, "torch").gradients
        return torch.cat([found[name].detach().flatten() for name in sorted(found)])

    try:
        reverse, again, mixed = by("reverse"), by("reverse"), by("mixed")
    except Exception:
        return None  # what is not differentiable by the way asked for is said where it is asked for
    if not torch.equal(reverse, again) or not reverse.isfinite().all():
        return None
    return float((reverse - mixed).norm() / reverse.norm().clamp_min(1e-300))
