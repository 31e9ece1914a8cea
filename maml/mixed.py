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
    loss: SetLoss,
    weights: Params,
    task: Task,
    *,
    optimizer: Optimizer,
    steps: int,
    order: str,
    remember: bool,
) -> Outer:
    """Differentiate the query loss after ``steps`` steps with respect to the initial weights.

    Args:
        loss: The loss of a set, support or query.
        weights: ``{name: […]}``, shared by all tasks.
        task: B tasks.
        optimizer: A TorchOpt functional optimizer whose rule is element-wise.
        steps: Inner-loop steps.
        order: "second", or "first" to leave the Hessian out.
        remember: Keep what each step computed for its way back; else only its weights, and
            compute it once more: memory that grows with the steps by the weights alone.
    """
    n_tasks = len(task.support_x)
    second = order == "second"

    def take(at: Params, state: Any, again: bool) -> tuple[Any, _Rule]:
        support = loss.gradient(at, task.support_x, task.support_y, again=again)
        if state is None:
            state = optimizer.init(support.gradients)
        return support.point, _Rule(optimizer, at, support.gradients, state)

    at = {
        name: tensor.expand(n_tasks, *tensor.shape) for name, tensor in loss.stored(weights).items()
    }
    state: Any = None
    trajectory: list[Any] = []
    for _ in range(steps):
        point, rule = take(at, state, again=second and remember)
        trajectory.append((point, rule) if remember else (at, state))
        at, state = rule.result
    query = loss.gradient(at, task.query_x, task.query_y, again=False)

    v, v_state, total = query.gradients, None, None
    for step in reversed(range(steps)):
        kept = trajectory.pop()
        point, rule = kept if remember else take(kept[0], kept[1], again=second)
        v, v_gradient, v_state = rule.pull_back(v, v_state)
        if second and step > 0:
            tangent = loss.hessian_vector(point, v_gradient, total=False)
            v = {name: tensor + tangent[name] for name, tensor in v.items()}
        elif second:
            # Here the tasks meet, at the weights they share: only their sum is asked for.
            total = loss.hessian_vector(point, v_gradient, total=True)
    gradients = _sum_over_tasks(v)
    if total is not None:
        gradients = {name: tensor + total[name] for name, tensor in gradients.items()}
    return Outer(gradients, query.losses, query.outputs)


def _sum_over_tasks(params: Params) -> Params:
    # By additions: torch's reduction is slow over tensors whose memory order is not their own.
    first, *others = zip(*(tensor.unbind(0) for tensor in params.values()), strict=True)
    sums = [tensor.clone() for tensor in first]
    for other in others:
        torch._foreach_add_(sums, list(other))
    return dict(zip(params, sums, strict=True))


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
        names = tuple(self._weights)
        outputs = [*(self._after[name] for name in names), *(leaf for leaf, _ in reached)]
        cotangents = [*(v[name] for name in names), *(cotangent for _, cotangent in reached)]
        inputs = [self._weights[name] for name in names]
        inputs += [*(self._gradients[name] for name in names), *self._before]
        pulled = torch.autograd.grad(
            outputs, inputs, cotangents, allow_unused=True, materialize_grads=True
        )
        n = len(names)
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
