"""The meta-gradient at the solution of an inner problem, without the way there.

The inner loop looks for φ = argmin L_support(φ) + λ/2 ‖φ − θ‖² (iMAML, Rajeswaran et al. 2019,
arXiv:1909.04630, equation 3). There ∂φ/∂θ = (I + H/λ)⁻¹ with H = ∇²L_support(φ) (lemma 1), so that
the meta-gradient g solves

    (I + H/λ) g = ∇L_query(φ),

which a few steps of conjugate gradient do, task by task (algorithm 2): memory does not grow with
the inner steps, and how φ was found does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.metagradient.derivatives import SetLoss, of_each_task
from maml.metagradient.forward_over_reverse import Outer
from maml.metagradient.inner import Params
from maml.metagradient.rules import MakeRule

LEAST_CURVATURE = 0.5
"""Of what (1 + δ) I alone would have along a direction. At a minimum H adds to it; where H takes
more than half away, the loop is far from one, and a division by next to nothing would make the
gradient one of rounding, or of chance."""


@torch.no_grad()
def meta_gradient(
    loss: SetLoss,
    weights: Params,
    task: Task,
    *,
    rule: MakeRule,
    steps: int,
    proximal: float,
    cg_steps: int,
    cg_damping: float,
) -> Outer:
    """Differentiate the query loss at the inner problem's solution by the initial weights.

    Args:
        loss: The loss of a set, support or query.
        weights: ``{name: […]}``, shared by all tasks.
        task: B tasks.
        rule: The inner optimizer's (`maml.metagradient.rules.make_rule`).
        steps: Inner-loop steps.
        proximal: λ.
        cg_steps: Steps of conjugate gradient; with 0, g = ∇L_query(φ).
        cg_damping: δ of ((1 + δ) I + H/λ) g = ∇L_query(φ): where a loop has not arrived, H may
            have negative eigenvalues.
    """
    start = of_each_task(loss.enter(weights), len(task.support_x))
    at, state = start, None
    for _ in range(steps):
        gradients = loss.gradient(at, task.support_x, task.support_y, again=False).gradients
        pulled = {
            name: torch.add(gradient, at[name] - start[name], alpha=proximal)
            for name, gradient in gradients.items()
        }
        taken = rule(at, pulled, state, None)
        at, state = taken.weights, taken.state
    query = loss.gradient(at, task.query_x, task.query_y, again=False)

    point: Any = None
    if cg_steps:
        point = loss.gradient(at, task.support_x, task.support_y, again=True).point

    calls = itertools.count(1)

    def product(vector: Params) -> Params:
        # One for each step; the last uses the point up.
        again = next(calls) < cg_steps
        curved = loss.hessian_vector(point, vector, total=False, again=again)
        return {
            name: torch.add((1 + cg_damping) * tensor, curved[name], alpha=1 / proximal)
            for name, tensor in vector.items()
        }

    least = LEAST_CURVATURE * (1 + cg_damping)
    solution = conjugate_gradient(product, query.gradients, cg_steps, least)
    summed = {name: tensor.sum(0) for name, tensor in solution.items()}
    return Outer(loss.leave(summed), query.losses, query.outputs, [])


def conjugate_gradient(
    product: Callable[[Params], Params], b: Params, steps: int, least: float = 0.0
) -> Params:
    """Solve A x = b for each of B tasks by at most ``steps`` steps from zero.

    Conjugate gradient (Hestenes and Stiefel 1952, doi:10.6028/jres.049.044), for symmetric positive
    definite A. A task's steps end where its residual is nothing but rounding, or where the
    curvature along the next direction p, pᵀAp / pᵀp, is ``least`` or less; if p is b, x is b.

    Args:
        product: A times vectors ``{name: [B, …]}``.
        b: ``{name: [B, …]}``; not changed.
        steps: At most so many; 0 returns ``b``.
        least: The curvature that is too little; at least 0.
    """
    if not steps:
        return b
    x = {name: torch.zeros_like(tensor) for name, tensor in b.items()}
    residual = direction = b
    left = _dot(b, b)
    enough = left * torch.finfo(left.dtype).eps ** 2
    goes_on, moved = left > enough, torch.zeros_like(left, dtype=torch.bool)
    for _ in range(steps):
        ahead = product(direction)
        curvature = _dot(direction, ahead)
        goes_on = goes_on & (left > enough) & (curvature > least * _dot(direction, direction))
        moved |= goes_on
        rate = torch.where(goes_on, left / curvature, 0)
        x = _moved(x, rate, direction)
        residual = _moved(residual, -rate, ahead)
        before, left = left, _dot(residual, residual)
        direction = _moved(residual, torch.where(goes_on, left / before, 0), direction)
    return {
        name: torch.where(_beside(moved, tensor), tensor, b[name]) for name, tensor in x.items()
    }


def _dot(a: Params, b: Params) -> Tensor:
    """Return each task's inner product, ``[B]``."""
    return torch.stack([(a[name] * b[name]).flatten(1).sum(1) for name in a]).sum(0)


def _moved(at: Params, rate: Tensor, direction: Params) -> Params:
    """Return ``at`` plus, for each task, ``rate [B]`` times ``direction``."""
    return {
        name: torch.addcmul(tensor, _beside(rate, tensor), direction[name])
        for name, tensor in at.items()
    }


def _beside(per_task: Tensor, tensor: Tensor) -> Tensor:
    """Return ``per_task [B]`` in a shape that broadcasts against ``tensor [B, …]``."""
    return per_task.view(-1, *[1] * (tensor.dim() - 1))
