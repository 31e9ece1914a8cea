"""The inner loop for one task, and its derivative in reverse mode through all steps.

The functions for one task are pure, so ``torch.func.vmap`` can batch them over tasks.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.metagradient import draws
from maml.metagradient.by_task import Batching, each_task
from maml.metagradient.problem import Outer, Problem, called
from maml.metagradient.rules import make_rule
from maml.networks.stack import remembering
from maml.params import Params

Gradient: TypeAlias = Callable[[Callable[[Params], Tensor], Params], Params]
"""Takes the gradient of a function of weights."""


def adapt(problem: Problem, task: Any, gradient: Gradient | None = None) -> Params:
    """Return one task's adapted parameters after all inner steps; differentiable: see `Problem`."""
    with remembering():
        weights = [problem.start, *trajectory(problem, task, gradient)][-1]
    return problem.pulled_at_end(weights, problem.start)


def by_autograd(inner: Callable[[Params], Tensor], weights: Params) -> Params:
    """Return the gradient by plain autograd; it is differentiable if gradients are enabled."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias of a leaf, because hooks on a parameter are for the meta-gradient alone. It is no
        # view_as, whose derivative fails for the sparse gradient of an embedding.
        alias = torch.ops.aten.alias
        views = {
            n: (alias(w) if w.is_leaf else w) if w.requires_grad else w.detach()
            for n, w in weights.items()
        }
        at = {n: w if w.requires_grad else w.requires_grad_() for n, w in views.items()}
        found = torch.autograd.grad(
            inner(at), list(at.values()), create_graph=create_graph, allow_unused=True,
            materialize_grads=True,
        )  # fmt: skip
    return dict(zip(at, found, strict=True))


def trajectory(problem: Problem, task: Any, gradient: Gradient | None = None) -> Iterator[Params]:
    """Yield one task's adapted parameters after each inner step: ``{name: […]}``.

    ``gradient`` takes the gradient of a function at weights; by default ``torch.func.grad``.
    """
    take: Gradient = gradient or (lambda inner, weights: torch.func.grad(inner)(weights))
    optimizer = make_rule(problem.optimizer, problem.lr, problem.momentum, problem.second_moment)
    weights, state = problem.start, None
    for step in range(problem.steps):

        def inner(weights: Params, step: int = step) -> Tensor:
            with draws.at("support", step):
                return called(problem.support, problem.params(weights, step), task, step)[0]

        # To first order, nothing is differentiated through the gradients.
        with torch.set_grad_enabled(torch.is_grad_enabled() and problem.order == "second"):
            gradients = take(inner, weights)
            if problem.pull_of_steps:
                gradients = {
                    name: gradient + problem.proximal * (weights[name] - problem.start[name])
                    for name, gradient in gradients.items()
                }
        if problem.transform is not None:
            gradients = problem.transform.changed(gradients, weights)
        rates = None if problem.rates is None else problem.rates[step]
        weights, state = optimizer(weights, gradients, state, rates).after
        yield weights


@remembering()
def outer_loss(
    problem: Problem, task: Any, gradient: Gradient | None = None
) -> tuple[Tensor, Tensor]:
    """Return one task's outer loss, and the query loss's outputs after the last step."""

    def query(weights: Params, step: int) -> tuple[Tensor, Tensor]:
        with draws.at("query", step):
            return called(problem.query, problem.params(weights, step), task, step)

    if not problem.steps:
        return query(problem.start, 0)
    total = None
    for step, weights in enumerate(trajectory(problem, task, gradient)):
        weight = problem.query_weight(step)
        if weight or step == problem.last_step:
            loss, outputs = query(weights, step)
            weighted = loss if weight == 1 else weight * loss
            total = weighted if total is None else total + weighted
    assert total is not None
    return total, outputs


@torch.enable_grad()
def through_loop(problem: Problem, tasks: Any, batching: Batching = "vmap") -> Outer:
    """Differentiate the outer loss of B tasks in reverse mode: memory grows with the steps."""
    leaves, structure = pytree.tree_flatten(problem.tensors())
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    own = problem.at(pytree.tree_unflatten(leaves, structure))
    take = by_autograd if batching == "tasks" else None
    losses, outputs = each_task(lambda task: outer_loss(own, task, take), batching)(tasks)
    # Some tensors may be unused, at some step or to first order.
    gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
    by_name = pytree.tree_unflatten(gradients, structure)
    outputs = pytree.tree_map(torch.detach, outputs)
    return Outer(by_name, losses.detach(), outputs)
