"""`Derivatives` of any losses: all tasks at once by ``torch.func.vmap``, or one task at a time.

Each task has its own weights, even where all begin with the same numbers. So the gradient of the
sum of all losses consists of each task's gradient. The product with the Hessian is a second
backward pass through the graph of the gradient, not a forward derivative: forward mode would
differentiate even what an author keeps out of the graph by ``torch.no_grad`` or ``.data``. With one
task at a time, nothing is batched or transformed. So control flow, recurrent layers and custom
functions behave as in a plain loop.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.execution.exact import Exact
from maml.kernels.derivatives import Derivatives, Gradient, Part
from maml.metagradient import draws
from maml.metagradient.problem import Problem, called
from maml.params import Params, sum_rows


class FunctionDerivatives(Derivatives):
    """See `maml.kernels.derivatives.Derivatives`; the coordinates are the problem's own names."""

    def __init__(self, problem: Problem, *, alone: bool = False) -> None:
        """``alone``: each call gets a batch of one task, and the losses may draw."""
        self._losses = {"support": problem.support, "query": problem.query}
        self._moving = tuple(problem.start)
        self.alone = alone

    @torch.enable_grad()
    def gradient(self, part: Part, at: Params, tasks: Any, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`."""
        if self.alone:
            at, tasks = pytree.tree_map(lambda tensor: tensor[0], (at, tasks))
        names = self._moving if part == "support" else tuple(at)
        leaves = {n: t.detach().requires_grad_(again or n in names) for n, t in at.items()}
        losses, outputs = self._call(part, leaves, tasks, step)
        total = losses if self.alone else losses.sum()
        found = grad([total], [leaves[name] for name in names], create_graph=again)
        gradients = {name: self._batch(g) for name, g in zip(names, found, strict=True)}
        # Gradient edges keep the graph alive, but not the numbers of the gradients.
        edge = torch.autograd.graph.get_gradient_edge
        point = (leaves, names, [g if g.is_leaf else edge(g) for g in found]) if again else None
        outputs = pytree.tree_map(self._batch, outputs)
        return Gradient(self._batch(losses), outputs, gradients, point)

    def _call(self, part: Part, params: Params, tasks: Any, step: int) -> tuple[Tensor, Tensor]:
        def one(params: Params, task: Any) -> tuple[Tensor, Tensor]:
            return called(self._losses[part], params, task, step)

        if self.alone:
            with draws.at(part, step):
                return one(params, tasks)
        with Exact():
            return torch.func.vmap(one)(params, tasks)

    def _batch(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[None] if self.alone else tensor.detach()

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        leaves, names, gradients = point
        along = [vector[name][0] if self.alone else vector[name] for name in names]
        found = grad(gradients, [*leaves.values()], along, retain_graph=again)
        products = dict(zip(leaves, map(self._batch, found), strict=True))
        return {name: sum_rows(p) for name, p in products.items()} if total else products


def grad(
    outputs: Sequence[Any],
    inputs: list[Tensor],
    along: Sequence[Tensor | None] | None = None,
    **options: bool,
) -> tuple[Tensor, ...]:
    """Return the gradient by each input; zero if the outputs do not depend on the input."""
    along = along or [None] * len(outputs)
    # A constant output has no graph, and adds nothing to the gradient.
    graph = [
        (o, v)
        for o, v in zip(outputs, along, strict=True)
        if not isinstance(o, Tensor) or o.requires_grad
    ]
    if not graph or not inputs:
        return tuple(map(torch.zeros_like, inputs))
    return torch.autograd.grad(
        [output for output, _ in graph],
        inputs,
        [vector for _, vector in graph],
        allow_unused=True,
        materialize_grads=True,
        **options,
    )
