"""Transformed inner gradients of B tasks, and the way back through their transformation."""

import torch

from maml.kernels.derivatives import Derivatives
from maml.metagradient.problem import Problem
from maml.params import Params


class Transformed:
    """What `Problem.transform` makes of gradients in coordinates of some derivatives.

    Attributes:
        gradients: The result, ``{name: [B, …]}`` in the same coordinates.
    """

    def __init__(self, problem: Problem, derivatives: Derivatives, gradients: Params) -> None:
        assert problem.transform is not None
        function, tensors = problem.transform

        def one(gradients: Params) -> Params:
            named = derivatives.leave(gradients)
            own = {name: named[name] for name in problem.start}
            return derivatives.enter(named | function(own, self._tensors))

        with torch.enable_grad():
            self._before = {n: g.detach().requires_grad_() for n, g in gradients.items()}
            self._tensors = {n: t.detach().requires_grad_() for n, t in tensors.items()}
            self._after = derivatives.each(one, self._before)
        self.gradients = {name: tensor.detach() for name, tensor in self._after.items()}

    def pull_back(self, v: Params, scale: float) -> tuple[Params, Params]:
        """Return the cotangents of the gradients, and of the tensors, summed over tasks.

        ``v`` times ``scale`` is that of the result.
        """
        names = tuple(self._before)
        inputs = [*self._before.values(), *self._tensors.values()]
        found = torch.autograd.grad(
            [self._after[name] for name in names],
            inputs,
            [scale * v[name] for name in names],
            allow_unused=True,
            materialize_grads=True,
        )
        of_tensors = dict(zip(self._tensors, found[len(names) :], strict=True))
        return dict(zip(names, found, strict=False)), of_tensors
