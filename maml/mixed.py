"""The meta-gradient of an inner loop, forward over reverse.

Reverse mode through the inner loop keeps the graphs of all steps. Here the loop's trajectory of
weights is kept, and the query loss's gradient is pulled back through one step after another,

    v ← (∂θ'/∂θ)ᵀ v + H(θ) (∂θ'/∂g)ᵀ v,        θ' = optimizer(θ, g),  g = ∇L_support(θ),

where the product with the Hessian H is the gradient's forward derivative (MixFlow-MG,
arXiv:2505.00793). It is the same number: only the order of the products differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torchopt
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.derivatives import SetLoss
from maml.inner import Optimizer, Params


class Outer(NamedTuple):
    """Σ gradient ``{name: […]}``, and per task the query loss ``[B]`` and outputs ``[B, E, …]``."""

    gradients: Params
    losses: Tensor
    outputs: Tensor


@torch.no_grad()
def meta_gradient(
    loss: SetLoss, weights: Params, task: Task, *, optimizer: Optimizer, steps: int, order: str
) -> Outer:
    """Differentiate the query loss after ``steps`` steps with respect to the initial weights.

    Args:
        loss: The loss of a set, support or query.
        weights: ``{name: […]}``, shared by all tasks.
        task: B tasks.
        optimizer: A TorchOpt functional optimizer whose rule is element-wise.
        steps: Inner-loop steps.
        order: "second", or "first" to leave the Hessian out.
    """
    n_tasks = len(task.support_x)
    at = {name: tensor.expand(n_tasks, *tensor.shape) for name, tensor in weights.items()}
    second = order == "second"
    state: Any = None
    trajectory = []
    for _ in range(steps):
        support = loss.gradient(at, task.support_x, task.support_y, again=second)
        if state is None:
            state = optimizer.init(support.gradients)
        rule = _Rule(optimizer, at, support.gradients, state)
        trajectory.append((support.point, rule))
        at, state = rule.result
    query = loss.gradient(at, task.query_x, task.query_y, again=False)
    v, v_state = query.gradients, None
    for point, rule in reversed(trajectory):
        v, v_gradient, v_state = rule.pull_back(v, v_state)
        if second:
            tangent = loss.hessian_vector(point, v_gradient)
            v = {name: tensor + tangent[name] for name, tensor in v.items()}
    return Outer({name: t.sum(0) for name, t in v.items()}, query.losses, query.outputs)


class _Rule:
    """One application of the optimizer's rule at given weights, gradients and state.

    Attributes:
        result: The weights and the state after it.
    """

    def __init__(self, optimizer: Optimizer, weights: Params, gradients: Params, state: Any):
        with torch.enable_grad():
            self._weights, self._gradients = _leaves(weights), _leaves(gradients)
            before, structure = pytree.tree_flatten(state)
            before = [_leaf(leaf) for leaf in before]
            self._before = [leaf for leaf in before if _is_differentiable(leaf)]
            updates, new_state = optimizer.update(
                self._gradients,
                pytree.tree_unflatten(before, structure),
                params=self._weights,
                inplace=False,
            )
            self._after = torchopt.apply_updates(self._weights, updates, inplace=False)
        after, structure = pytree.tree_flatten(new_state)
        self._state_after = [leaf for leaf in after if _is_differentiable(leaf)]
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in after]
        self.result = (
            {name: tensor.detach() for name, tensor in self._after.items()},
            pytree.tree_unflatten(detached, structure),
        )

    def pull_back(
        self, v: Params, v_state: list[Tensor] | None
    ) -> tuple[Params, Params, list[Tensor]]:
        """Pull cotangents of the weights and the state after the rule back to before it.

        Returns:
            Those of the weights, of the gradients, and of the state.
        """
        if v_state is None:
            v_state = [torch.zeros_like(leaf) for leaf in self._state_after]
        # A new state tensor that no gradient reached has no graph: a constant.
        reached = [
            (leaf, cotangent)
            for leaf, cotangent in zip(self._state_after, v_state, strict=True)
            if leaf.requires_grad
        ]
        outputs = [*self._after.values(), *(leaf for leaf, _ in reached)]
        cotangents = [*v.values(), *(cotangent for _, cotangent in reached)]
        inputs = [*self._weights.values(), *self._gradients.values(), *self._before]
        pulled = torch.autograd.grad(
            outputs, inputs, cotangents, allow_unused=True, materialize_grads=True
        )
        n = len(self._weights)
        names = tuple(self._weights)
        return (
            dict(zip(names, pulled[:n], strict=True)),
            dict(zip(names, pulled[n : 2 * n], strict=True)),
            list(pulled[2 * n :]),
        )


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if _is_differentiable(leaf) else leaf


def _leaves(params: Params) -> Params:
    return {name: _leaf(tensor) for name, tensor in params.items()}
