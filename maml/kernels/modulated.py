"""The compiled derivatives of a problem whose parameters make a network's weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.kernels.derivatives import ByName, Gradient, Part, of_each_task, shared_once
from maml.kernels.native import NativeDerivatives
from maml.networks.modulated_loss import ModulatedLoss
from maml.params import Params


class NativeModulated(ByName):
    """See `maml.kernels.derivatives.Derivatives`: its coordinates are the problem's own names.

    With weights w = m(p) and the kernels' g = ∇L(w), the gradient by p is Jᵀ g, J = ∂m/∂p. Its
    derivative along u is Jᵀ (H J u) + (dJ/du)ᵀ g. Kernels compute g and the product with H, torch
    what is around them.
    """

    def __init__(self, query: ModulatedLoss, native: NativeDerivatives, moving: frozenset[str]):
        """``moving``: the names of what adapts."""
        self._weights = query.weights
        self._native = native
        self._moving = moving

    def enter(self, params: Params) -> Params:
        """See `Derivatives.enter`."""
        # Without their graph, which the problem's tensors have and derivatives here do not need.
        return {name: tensor.detach() for name, tensor in params.items()}

    def gradient(self, part: Part, at: Params, tasks: Task, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`; tasks are classification's."""
        found = self._native.gradient(part, self._made(at), tasks, step, again=again)
        by_weights = torch.func.vmap(self._native.leave)(found.gradients)
        names = self._moving if part == "support" else at.keys()
        moving, of_moving, fixed, of_fixed = _divided(at, names)
        gradients = torch.func.vmap(self._back, in_dims=(of_moving, of_fixed, 0))(
            moving, fixed, by_weights
        )
        return Gradient(found.losses, found.outputs, gradients, (found.point, at, by_weights))

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        of_native, at, by_weights = point
        moving, of_moving, fixed, of_fixed = _divided(at, vector.keys())

        def moved(moving: Params, fixed: Params, vector: Params) -> Params:
            def weights(moving: Params) -> Params:
                return self._weights(fixed | moving)

            return self._native.enter(torch.func.jvp(weights, (moving,), (vector,))[1])

        turned = torch.func.vmap(moved, in_dims=(of_moving, of_fixed, 0))(moving, fixed, vector)
        product = self._native.hessian_vector(of_native, turned, total=False, again=again)
        by_moved = torch.func.vmap(self._native.leave)(product)

        def along(
            moving: Params, fixed: Params, vector: Params, by_weights: Params, by_moved: Params
        ) -> Params:
            def back(moving: Params, by_weights: Params) -> Params:
                return self._back(fixed | moving, {}, by_weights)

            found: Params = torch.func.jvp(back, (moving, by_weights), (vector, by_moved))[1]
            return found

        products = torch.func.vmap(along, in_dims=(of_moving, of_fixed, 0, 0, 0))(
            moving, fixed, vector, by_weights, by_moved
        )
        return {name: p.sum(0) for name, p in products.items()} if total else products

    def answers(self, at: Params, tasks: Task) -> tuple[Tensor, Tensor]:
        """See `Native.answers`."""
        return self._native.answers(self._made(at), tasks)

    def _made(self, at: Params) -> Params:
        """Return the kernels' weights ``{ALL: [B, P]}``."""
        if all(tensor.stride(0) == 0 for tensor in at.values()):
            weights = self._weights({name: tensor[0] for name, tensor in at.items()})
            return of_each_task(self._native.enter(weights), len(next(iter(at.values()))))

        def one(at: Params) -> Params:
            return self._native.enter(self._weights(at))

        once, of_each = shared_once(at)
        made: Params = torch.func.vmap(one, in_dims=(of_each,))(once)
        return made

    def _back(self, moving: Params, fixed: Params, by_weights: Params) -> Params:
        """Return one task's gradient by ``moving``, of that by the weights."""

        def of(moving: Params) -> Params:
            return self._weights(fixed | moving)

        weights, pull_back, *_ = torch.func.vjp(of, moving)
        found: Params = pull_back({name: by_weights[name] for name in weights})[0]
        return found


def _divided(at: Params, names: Collection[str]) -> tuple[Any, ...]:
    """Return what has the names, and the rest, each with what `shared_once` says of it."""
    moving = {name: tensor for name, tensor in at.items() if name in names}
    fixed = {name: tensor for name, tensor in at.items() if name not in names}
    return *shared_once(moving), *shared_once(fixed)
