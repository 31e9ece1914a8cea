"""`Derivatives` of any losses, for all tasks at once, by ``torch.func``.

The product with the Hessian is a second reverse pass, not a forward one: what an author keeps out
of the graph, by ``torch.no_grad`` or ``.data``, forward mode would differentiate all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maml.execution.exact import Exact
from maml.kernels.derivatives import ByName, Gradient, Part, shared_once
from maml.metagradient.problem import Problem, called
from maml.params import Params


class FunctionDerivatives(ByName):
    """See `maml.kernels.derivatives.Derivatives`: its coordinates are the problem's own names."""

    def __init__(self, problem: Problem) -> None:
        self._losses = {"support": problem.support, "query": problem.query}
        self._moving = tuple(problem.start)

    def enter(self, params: Params) -> Params:
        """See `Derivatives.enter`."""
        return params

    def gradient(self, part: Part, at: Params, tasks: Any, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`."""
        names = self._moving if part == "support" else tuple(at)
        moving, fixed = _divided(at, names)
        # One convolution for all tasks, in place of a grouped one.
        (moving, of_moving), (fixed, of_fixed) = shared_once(moving), shared_once(fixed)

        def one(moving: Params, fixed: Params, task: Any) -> Any:
            def loss(moving: Params) -> tuple[Tensor, Tensor]:
                return called(self._losses[part], fixed | moving, task, step)

            return torch.func.grad_and_value(loss, has_aux=True)(moving)

        with Exact():
            gradients, (losses, outputs) = torch.func.vmap(one, in_dims=(of_moving, of_fixed, 0))(
                moving, fixed, tasks
            )
        point = (part, step, moving, of_moving, fixed, of_fixed, tasks) if again else None
        return Gradient(losses, outputs, gradients, point)

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        part, step, moving, of_moving, fixed, of_fixed, tasks = point

        def along(moving: Params, fixed: Params, vector: Params, task: Any) -> Params:
            def gradient(params: Params) -> Params:
                def loss(moving: Params) -> Tensor:
                    return called(self._losses[part], params | moving, task, step)[0]

                return torch.func.grad(loss)({name: params[name] for name in moving})

            # The Hessian is symmetric: rows by all parameters, of the columns along the vector.
            product: Params = torch.func.vjp(gradient, fixed | moving)[1](vector)[0]
            return product

        with Exact():
            products = torch.func.vmap(along, in_dims=(of_moving, of_fixed, 0, 0))(
                moving, fixed, vector, tasks
            )
        return {name: p.sum(0) for name, p in products.items()} if total else products


def _divided(at: Params, names: tuple[str, ...]) -> tuple[Params, Params]:
    rest = {name: tensor for name, tensor in at.items() if name not in names}
    return {name: at[name] for name in names}, rest
