"""The compiled derivatives of a problem without inner steps, whose loss is one of features."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.kernels.convnet import ALL, ConvNetFeatures
from maml.kernels.derivatives import Derivatives, Gradient, Part
from maml.networks.conv4 import Conv4
from maml.networks.feature_loss import FeatureLoss, both
from maml.networks.norms import tensors
from maml.params import Params


class NativeFeatures(Derivatives):
    """See `maml.kernels.derivatives.Derivatives`; only the query loss has any.

    Kernels compute the features and the way back from them; torch what the classifier makes of
    them. So parameters that the network does not have keep their own names.
    """

    whole = True

    def __init__(self, query: FeatureLoss) -> None:
        assert isinstance(query.network, Conv4)
        self.query, self.convnet = query, ConvNetFeatures(query.network)
        self.absent: Collection[str] = self.convnet.absent
        self._weights = frozenset(tensors(query.network))

    def enter(self, params: Params) -> Params:
        """See `Derivatives.enter`."""
        return self.convnet.enter(params) | self._others(params)

    def leave(self, gradients: Params) -> Params:
        """See `Derivatives.leave`."""
        return self.convnet.leave(gradients) | self._others(gradients)

    def put(self, at: Params, params: Params) -> Params:
        """Not asked for: there is no step, and no parameter of one."""
        raise NotImplementedError

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """Not asked for: there is no step."""
        raise NotImplementedError

    def gradient(self, part: Part, at: Params, tasks: Task, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`."""
        assert part == "query" and not again
        features, point = self.convnet.features(at, both(tasks, 1))

        def loss(features: Tensor, own: Params, task: Task) -> tuple[Tensor, Tensor]:
            outputs = self.query.of_features(own, features, task)
            return self.query.loss(outputs, task.query_y), outputs

        of_both = torch.func.grad_and_value(loss, argnums=(0, 1), has_aux=True)
        (cotangent, own), (losses, outputs) = torch.func.vmap(of_both)(
            features, self._others(at), tasks
        )
        return Gradient(losses, outputs, self.convnet.pull_back(point, cotangent) | own, None)

    def answers(self, at: Params, tasks: Task) -> tuple[Tensor, Tensor]:
        """Return the classifier's outputs for the queries of B tasks, ``[B, E, N]``, twice.

        Normalised together with the support set, and by the statistics of the support set alone.
        """
        together, _ = self.convnet.outputs(at, both(tasks, 1))
        support, of_support = self.convnet.outputs(at, tasks.support_x)
        query, _ = self.convnet.outputs(at, tasks.query_x, of_support)
        of_features = torch.func.vmap(self.query.of_features)
        own = self._others(at)
        return (
            of_features(own, together, tasks),
            of_features(own, torch.cat([support, query], 1), tasks),
        )

    def _others(self, params: Params) -> Params:
        known = self._weights | {ALL}
        return {name: tensor for name, tensor in params.items() if name not in known}
