"""Meta-gradients that need only the end of the inner loop, not the steps that lead there.

`at_solution`: the loop looks for φ = argmin L_support(φ) + λ/2 ‖φ − θ‖² (iMAML, Rajeswaran et al.
2019, arXiv:1909.04630, equation 3). There ∂φ/∂θ = (I + H/λ)⁻¹ with H = ∇²L_support(φ) (lemma 1), so
that the meta-gradient g solves

    (I + H/λ) g = ∇L_query(φ).

A few steps of conjugate gradient solve this equation for each task (algorithm 2). Memory does not
grow with the inner steps, and the method that found φ does not matter. For a fixed parameter f, as
a learned weight decay, the implicit function theorem gives the gradient

    ∂L_query/∂f − (∂²L_support/∂f∂φ) g/λ.

`displaced`: Reptile (Nichol et al. 2018, arXiv:1803.02999, algorithm 1) moves the start θ towards
the end φ of a task's inner loop. This is a step along θ − φ: the gradient of ½ ‖θ − φ‖² with φ as
a constant. Nothing is differentiated. If Adam's second moment has a given start, the start moves in
the same way, towards the mean over tasks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maml.metagradient.forward_over_reverse import adapt
from maml.metagradient.function import Derivatives
from maml.metagradient.problem import Outer, Problem, Tensors, by_name
from maml.metagradient.rules import Moment
from maml.params import Params, sum_rows

LEAST_CURVATURE = 0.5
"""Stop when the curvature falls below this share of (1 + δ): the inner loop has not converged. At a
minimum, H adds to (1 + δ). If H takes away more than half of (1 + δ), a division by almost zero
would fill the gradient with rounding errors."""


@torch.no_grad()
def at_solution(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Differentiate the query loss of B tasks at the inner problem's solution."""
    assert problem.implicit is not None
    cg_steps, damping, cg_lambda = problem.implicit
    cg_lambda = cg_lambda or problem.proximal
    last = problem.last_step
    at, _ = adapt(problem, tasks, derivatives)
    query = derivatives.gradient("query", at, tasks, last, again=False)
    point: Any = None
    if cg_steps or problem.fixed:
        point = derivatives.gradient("support", at, tasks, last, again=True).point

    def product(vector: Params) -> Params:
        curved = derivatives.hessian_vector(point, vector, total=False, again=True)
        return {
            name: torch.add((1 + damping) * tensor, curved[name], alpha=1 / cg_lambda)
            for name, tensor in vector.items()
        }

    least = LEAST_CURVATURE * (1 + damping)
    b = {name: query.gradients[name] for name in problem.start}
    solution = conjugate_gradient(product, b, cg_steps, least, 1 / (1 + damping))
    fixed: Params = {}
    if problem.fixed:
        by = derivatives.hessian_vector(point, solution, total=False)
        rows = {n: query.gradients[n] - by[n] / problem.proximal for n in problem.fixed}
        fixed = {name: sum_rows(tensor) for name, tensor in rows.items()}
    gradients = Tensors({n: sum_rows(t) for n, t in solution.items()}, fixed, [], [])
    return Outer(gradients, query.losses, query.outputs)


def conjugate_gradient(
    product: Callable[[Params], Params],
    b: Params,
    steps: int,
    least: float = 0.0,
    otherwise: float = 1.0,
) -> Params:
    """Solve A x = b for each of B tasks by at most ``steps`` steps from zero.

    Conjugate gradient (Hestenes and Stiefel 1952, doi:10.6028/jres.049.044), for symmetric positive
    definite A. ``product`` returns A times vectors ``{name: [B, …]}``. A task stops if its residual
    is only rounding errors, or if the curvature pᵀAp / pᵀp along its next direction p is at most
    ``least``. A task without any step gets x = ``otherwise`` times b. With ``steps`` 0, x is b.
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
        x = _along(x, rate, direction)
        residual = _along(residual, -rate, ahead)
        before, left = left, _dot(residual, residual)
        direction = _along(residual, torch.where(goes_on, left / before, 0), direction)
    return {
        name: torch.where(_beside(moved, tensor), tensor, otherwise * b[name])
        for name, tensor in x.items()
    }


def _dot(a: Params, b: Params) -> Tensor:
    """Return each task's inner product, ``[B]``."""
    return torch.stack([(a[name] * b[name]).flatten(1).sum(1) for name in a]).sum(0)


def _along(at: Params, rate: Tensor, direction: Params) -> Params:
    """Return ``at`` plus, for each task, ``rate [B]`` times ``direction``."""
    return {
        name: torch.addcmul(tensor, _beside(rate, tensor), direction[name])
        for name, tensor in at.items()
    }


def _beside(per_task: Tensor, tensor: Tensor) -> Tensor:
    """Return ``per_task [B]`` in a shape that broadcasts against ``tensor [B, …]``."""
    return per_task.view(-1, *[1] * (tensor.dim() - 1))


@torch.no_grad()
def displaced(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Return θ − φ, summed over B tasks; the query loss is only reported."""
    at, state = adapt(problem, tasks, derivatives)
    query = derivatives.gradient("query", at, tasks, problem.last_step, again=False)
    start = derivatives.laid_out(problem.start)
    apart = {name: sum_rows(tensor - at[name]) for name, tensor in start.items()}
    of_moment: Params = {}
    if (first := problem.second_moment) is not None:
        n, end = len(query.losses), state.second
        total = {name: n * t - sum_rows(end.total[name]) for name, t in first.total.items()}
        of_moment = by_name(Moment(total, n * (first.weight - end.weight)))
    still = {name: torch.zeros_like(tensor) for name, tensor in problem.fixed.items()}
    rates: list[Params] = [{} for _ in problem.rates or ()]
    gradients = Tensors(apart, still, rates, [], second_moment=of_moment)
    return Outer(gradients, query.losses, query.outputs)
