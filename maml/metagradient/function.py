"""Derivatives of any losses: all tasks at once by ``torch.func.vmap``, or one task at a time.

Each task has its own weights, even where all begin with the same numbers. So the gradient of the
sum of all losses consists of each task's gradient. The product with the Hessian is a second
backward pass through the graph of the gradient, not a forward derivative: forward mode would
differentiate even what an author keeps out of the graph by ``torch.no_grad`` or ``.data``. With one
task at a time, nothing is batched or transformed. So control flow, recurrent layers and custom
functions behave as in a plain loop.

Shape legend: B tasks.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.metagradient import draws
from maml.metagradient.by_task import each_task
from maml.metagradient.problem import Problem, called
from maml.params import Params, sum_rows

Part: TypeAlias = Literal["support", "query"]


class Gradient(NamedTuple):
    """A loss and its first derivative, per task.

    Attributes:
        losses: ``[B]``.
        outputs: ``[B, …]``, or a nest of such: what the loss returns in addition to its value.
        gradients: ``{name: [B, …]}``.
        point: The data that `Derivatives.hessian_vector` needs about these parameters.
    """

    losses: Tensor
    outputs: Any
    gradients: Params
    point: Any


class Derivatives:
    """The derivatives of an inner problem's losses by its parameters, for B tasks at once."""

    def __init__(self, problem: Problem, *, alone: bool = False) -> None:
        """``alone``: each call gets a batch of one task, and the losses may draw."""
        self._losses = {"support": problem.support, "query": problem.query}
        self._moving = tuple(problem.start)
        self.alone = alone

    def laid_out(self, params: Params) -> Params:
        """Return the same parameters, in the memory order that is the fastest here."""
        return params

    @torch.enable_grad()
    def gradient(self, part: Part, at: Params, tasks: Any, step: int, *, again: bool) -> Gradient:
        """Return losses, outputs and gradients.

        Args:
            part: The support loss, whose gradient covers the parameters that adapt, or the query
                loss, whose gradient covers all parameters.
            at: ``{name: [B, …]}``; a tensor that tasks share is expanded over B (stride 0).
            tasks: B tasks.
            step: The inner step that the losses receive.
            again: Whether the caller will call `hessian_vector` at this point.
        """
        if self.alone:
            with torch.no_grad():  # as `at` was made: forward may write there (max_norm)
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
        found: tuple[Tensor, Tensor] = each_task(one, "vmap")(params, tasks)
        return found

    def _batch(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[None] if self.alone else tensor.detach()

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, scale: float = 1.0, again: bool = False
    ) -> Params:
        """Return the derivative of ``<gradient, scale · vector>`` by all parameters at ``point``.

        ``vector {name: [B, …]}`` has the names of the gradient. The result ``{name: [B, …]}`` has
        all parameters; with ``total`` it is the sum over tasks, ``{name: […]}``. A call uses up the
        point, unless ``again`` announces another call.
        """
        leaves, names, gradients = point
        # Scaled before, as in a plain loop: a backward pass may not be linear (a clamping hook).
        along = [scale * (vector[name][0] if self.alone else vector[name]) for name in names]
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
