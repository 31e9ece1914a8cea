"""`Derivatives` of any losses for one task at a time, by plain autograd.

What a loss does is what is differentiated: ``torch.no_grad``, control flow, recurrent layers and
custom functions mean what they mean in a loop of one's own, as nothing is batched or transformed.
The meta-gradient goes back step by step (`maml.metagradient.forward_over_reverse`), so memory does
not grow with the inner steps; the product with the Hessian is a second backward pass through the
graph of the gradient.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from maml.kernels.derivatives import Gradient, Part
from maml.metagradient import draws
from maml.metagradient.function import FunctionDerivatives, edges, grad
from maml.metagradient.problem import called
from maml.params import Params

Batching: TypeAlias = Literal["vmap", "tasks"]
"""vmap: all tasks at once; tasks: one after the other, by plain autograd."""


class TaskDerivatives(FunctionDerivatives):
    """See `maml.kernels.derivatives.Derivatives`: the tasks one after the other."""

    def each(self, function: Callable[[Any], Any], tasks: Any) -> Any:
        """See `Derivatives.each`."""
        return each_task(function, "tasks")(tasks)

    @torch.enable_grad()
    def gradient(self, part: Part, at: Params, tasks: Any, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`."""
        names = self._moving if part == "support" else tuple(at)
        points, found = [], []
        for params, task in unstacked((at, tasks)):
            leaves = {n: t.detach().requires_grad_(again or n in names) for n, t in params.items()}
            with draws.at(part, step):
                loss, outputs = called(self._losses[part], leaves, task, step)
            by = grad([loss], [leaves[name] for name in names], create_graph=again)
            points.append((leaves, edges(by)))
            found.append((loss.detach(), outputs.detach(), *(g.detach() for g in by)))
        losses, outputs, *gradients = stacked(found)
        of_names = dict(zip(names, gradients, strict=True))
        return Gradient(losses, outputs, of_names, (names, points) if again else None)

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        names, points = point
        products = []
        for (leaves, gradients), along in zip(points, unstacked(vector), strict=True):
            inputs = [*leaves.values()]
            found = grad(gradients, inputs, [along[n] for n in names], retain_graph=again)
            products.append(dict(zip(leaves, found, strict=True)))
        every: Params = stacked(products)
        return {name: p.sum(0) for name, p in every.items()} if total else every


def each_task(function: Callable[..., Any], batching: Batching) -> Callable[..., Any]:
    """Return a function of one task as one of B tasks: what it takes and returns is ``[B, …]``."""
    if batching == "vmap":
        return torch.func.vmap(function)
    return lambda *arguments: stacked([function(*own) for own in unstacked(arguments)])


def unstacked(tasks: Any) -> Iterator[Any]:
    """Yield each of B tasks, a nest of tensors ``[B, …]``, without the leading dimension."""
    for i in range(len(pytree.tree_leaves(tasks)[0])):
        yield pytree.tree_map(lambda tensor, i=i: tensor[i], tasks)


def stacked(results: list[Any]) -> Any:
    """Return results for one task each as one for all, ``[B, …]``."""
    if len(results) == 1:  # without a copy
        return pytree.tree_map(lambda part: part[None], results[0])
    return pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def one_by_one(tasks: Any) -> Iterator[Any]:
    """Yield each of B tasks as a batch of one: all tensors ``[1, …]``, as those of a list are."""
    if isinstance(tasks, list):
        yield from tasks
        return
    for task in unstacked(tasks):
        yield pytree.tree_map(lambda tensor: tensor[None], task)
