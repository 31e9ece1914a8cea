"""The compiled derivatives of a problem whose losses are a network's cross-entropy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from datasets.tasks import Task
from maml.kernels.convnet import ALL, ConvNetLoss
from maml.kernels.derivatives import Derivatives, Gradient, Part
from maml.networks.conv4 import Conv4
from maml.networks.loss import MiniBatches, part_of
from maml.params import Params


class NativeDerivatives(Derivatives):
    """See `maml.kernels.derivatives.Derivatives`."""

    whole = True

    def __init__(self, network: Conv4, batches: MiniBatches | None = None) -> None:
        """``batches``: of the support loss, see `NetworkLoss`."""
        self.loss, self._batches = ConvNetLoss(network), batches
        self.absent: Collection[str] = self.loss.absent

    def enter(self, params: Params) -> Params:
        """See `Derivatives.enter`."""
        return self.loss.enter(params)

    def leave(self, gradients: Params) -> Params:
        """See `Derivatives.leave`."""
        return self.loss.leave(gradients)

    def put(self, at: Params, params: Params) -> Params:
        """See `Derivatives.put`."""
        # A copy: what tasks share has no memory of its own for each.
        changed = at[ALL].contiguous() if at[ALL].stride(0) == 0 else at[ALL].clone()
        for where, part in self.loss.places(params):
            changed[:, where] = part
        return {ALL: changed}

    def answers(self, at: Params, tasks: Task) -> tuple[Tensor, Tensor]:
        """Return the network's outputs for the queries of B tasks, ``[B, E, N]``, twice.

        Normalised by the statistics of the query set, and by those of the support set.
        """
        transductive, _ = self.loss.outputs(at, tasks.query_x)
        _, of_support = self.loss.outputs(at, tasks.support_x)
        return transductive, self.loss.outputs(at, tasks.query_x, of_support)[0]

    def gradient(self, part: Part, at: Params, tasks: Task, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`; tasks are classification's."""
        x, y = part_of(tasks, part)
        if part == "support" and self._batches is not None:
            places = self._batches.places(step, y.shape[1])
            x, y = x[:, places], y[:, places]
        return self.loss.gradient(at, x, y, again=again)

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        return self.loss.hessian_vector(point, vector, total=total, again=again)
