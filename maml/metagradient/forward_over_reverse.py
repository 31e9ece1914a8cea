"""The meta-gradient of an inner loop, forward over reverse.

Reverse mode through the inner loop keeps the graphs of all steps. Here the loop's trajectory of
weights is kept, and the query loss's gradient is pulled back through one step after another,

    v ← (∂θ'/∂θ)ᵀ v + H(θ) (∂θ'/∂g)ᵀ v,        θ' = optimizer(θ, g),  g = ∇L_support(θ),

where the product with the Hessian H is the gradient's forward derivative (MixFlow-MG,
arXiv:2505.00793). It is the same number: only the order of the products differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.metagradient.derivatives import SetLoss, of_each_task
from maml.metagradient.inner import Params
from maml.metagradient.rules import MakeRule, Rule


class Outer(NamedTuple):
    """Σ gradient ``{name: […]}``, and per task the query loss ``[B]`` and outputs ``[B, E, …]``.

    ``rates``: for each step the Σ gradient ``{name: […]}`` of its rates, if they are learned.
    """

    gradients: Params
    losses: Tensor
    outputs: Tensor
    rates: list[Params]


@torch.no_grad()
def meta_gradient(
    loss: SetLoss,
    weights: Params,
    task: Task,
    *,
    rule: MakeRule,
    steps: int,
    order: str,
    remember: bool,
    rates: Sequence[Params] | None = None,
) -> Outer:
    """Differentiate the query loss after ``steps`` steps with respect to the initial weights.

    Args:
        loss: The loss of a set, support or query.
        weights: ``{name: […]}``, shared by all tasks.
        task: B tasks.
        rule: The inner optimizer's (`maml.metagradient.rules.make_rule`).
        steps: Inner-loop steps.
        order: "second", or "first" to leave the Hessian out.
        remember: Keep what each step computed for its way back; else only its weights, and
            compute it once more: memory that grows with the steps by the weights alone.
        rates: For each step ``{name: […]}``, as `maml.metagradient.inner.adapt` takes them.
    """
    second = order == "second"

    own_rates = [None if rates is None else _of_all(rates[i], weights, loss) for i in range(steps)]

    def take(step: int, at: Params, state: Any, again: bool) -> tuple[Any, Rule]:
        support = loss.gradient(at, task.support_x, task.support_y, again=again)
        return support.point, rule(at, support.gradients, state, own_rates[step])

    at = of_each_task(loss.enter(weights), len(task.support_x))
    state: Any = None
    trajectory: list[Any] = []
    for step in range(steps):
        point, taken = take(step, at, state, again=second and remember)
        trajectory.append((point, taken) if remember else (at, state))
        at, state = taken.weights, taken.state
    query = loss.gradient(at, task.query_x, task.query_y, again=False)

    v, v_state = query.gradients, None
    of_rates: list[Params] = []
    for step in reversed(range(steps)):
        kept = trajectory.pop()
        point, taken = kept if remember else take(step, kept[0], kept[1], again=second)
        v, v_gradient, scale, v_state, v_rates = taken.pull_back(v, v_state)
        if v_rates is not None:
            of_rates.insert(0, loss.leave(v_rates))
        if second:
            # At the first step the tasks meet, at the weights they share: only their sum is asked.
            first = step == 0
            tangent = loss.hessian_vector(point, v_gradient, total=first)
            v = {name: tensor.sum(0) for name, tensor in v.items()} if first else v
            v = {name: torch.add(v[name], tangent[name], alpha=scale) for name in v}
    if not (second and steps):
        v = {name: tensor.sum(0) for name, tensor in v.items()}
    return Outer(loss.leave(v), query.losses, query.outputs, of_rates)


def _of_all(rates: Params, weights: Params, loss: SetLoss) -> Params:
    """Return rates in the loss's own coordinates, one an element; zero where there is none."""
    return loss.enter(
        {
            name: rates[name].expand_as(weight) if name in rates else torch.zeros_like(weight)
            for name, weight in weights.items()
        }
    )
