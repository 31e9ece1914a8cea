"""The compiled derivatives of losses that are the plain cross-entropy of a `Conv4`.

A `Conv4` uses compiled kernels in every model (`maml.networks.stack`). For this one loss, the head
is compiled, too, and a step is one call. Only known losses allow this, so this module inspects the
losses.

Shape legend: B tasks, E examples, N ways, P weights.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.tasks import Task
from maml.kernels.convnet import convnet
from maml.kernels.derivatives import Derivatives, Gradient, Part
from maml.metagradient.problem import Problem
from maml.networks.conv4 import Conv4
from maml.networks.loss import MiniBatches, NetworkLoss, part_of
from maml.networks.ordinary import is_hooked, tensors
from maml.params import Params

ALL = "all weights"
"""The only tensor of these coordinates: ``[B, P]``, each task's kernel weights end to end."""
IGNORED = -100
"""The label that `F.cross_entropy` ignores (its ``ignore_index``); the kernels know no such."""


def native(problem: Problem, tasks: Any, *, heads: bool = False) -> NativeDerivatives | None:
    """Return the compiled derivatives of a problem's losses, or None for losses of another kind.

    Return None, too, for images of another size, for targets ``[B, E]`` that are not int64, and if
    a label is the one that cross-entropy ignores.
    ``heads``: also where only the output layer moves, although its features could be cached.
    """
    query = problem.query
    adapts = problem.steps or problem.implicit is not None
    support = problem.support if adapts else query
    batches = support if isinstance(support, MiniBatches) else None
    if batches is not None:
        support = batches.loss
    for loss in (query, support):
        if not isinstance(loss, NetworkLoss) or loss.loss is not F.cross_entropy:
            return None
    assert isinstance(query, NetworkLoss) and isinstance(support, NetworkLoss)
    if query.part != "query" or (adapts and support.part != "support"):
        return None
    network = query.network
    if support.network is not network:
        return None
    if type(network) is not Conv4 or not _has_its_head(network) or network.why_torch():
        return None
    params = problem.params(problem.start, 0)
    if params.keys() != tensors(network).keys():
        return None
    once = problem.steps and not problem.displacement and batches is None
    moving = params.keys() - problem.fixed.keys()
    if once and not heads and all(name.startswith(network.head_prefix) for name in moving):
        return None
    some = next(iter(params.values()))
    if some.device.type != "cpu" or some.dtype != network.head.weight.dtype:
        return None
    for x, y in (part_of(tasks, part) for part in ("support", "query")):
        fits = x.shape[2:] == network.image_shape and y.dtype == torch.int64 and y.dim() == 2
        if not fits or (y == IGNORED).any():
            return None
    return NativeDerivatives(network, batches)


def _has_its_head(network: Conv4) -> bool:
    head = network.get_submodule("head")
    return (
        type(head) is nn.Linear
        and (head.in_features, head.out_features) == (network.n_features, network.ways)
        and isinstance(head.bias, Tensor)
        and len(network._modules) == 2
        and not is_hooked(head)
        and not is_hooked(network)
    )


class NativeDerivatives(Derivatives):
    """See `maml.kernels.derivatives.Derivatives`."""

    whole = True

    def __init__(self, network: Conv4, batches: MiniBatches | None = None) -> None:
        """``batches``: which examples the support loss sees; None: all."""
        self._passes, self._batches = convnet(network.shape(network.ways)), batches
        weights = tensors(network)
        self._names = [name for name in weights if not name.endswith("conv.bias")]
        self._sizes = [weights[name].shape for name in self._names]
        self._biases = {n: t.shape for n, t in weights.items() if n not in self._names}
        self.absent: Collection[str] = self._biases

    def enter(self, params: Params) -> Params:
        """See `Derivatives.enter`."""
        return {ALL: torch.cat([_turned(params[name]).flatten() for name in self._names])}

    def leave(self, gradients: Params) -> Params:
        """See `Derivatives.leave`; for gradients of B tasks, return ``{name: [B, …]}``."""
        flat = gradients[ALL]
        parts = flat.split([size.numel() for size in self._sizes], -1)
        found = {
            name: _turned_back(part, size)
            for name, part, size in zip(self._names, parts, self._sizes, strict=True)
        }
        return found | {
            name: flat.new_zeros((*flat.shape[:-1], *size)) for name, size in self._biases.items()
        }

    def put(self, at: Params, params: Params) -> Params:
        """See `Derivatives.put`."""
        # A copy, because tasks may share the memory (stride 0).
        changed = at[ALL].contiguous() if at[ALL].stride(0) == 0 else at[ALL].clone()
        for name, part in zip(self._names, self._passes.parts(changed), strict=True):
            if name in params:
                part.copy_(params[name])
        return {ALL: changed}

    def gradient(self, part: Part, at: Params, tasks: Task, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`; the tasks are classification tasks."""
        x, y = part_of(tasks, part)
        if part == "support" and self._batches is not None:
            places = self._batches.places(step, y.shape[1])
            x, y = x[:, places], y[:, places]
        weights = self._passes.parts(at[ALL])
        losses, logits, gradients, kept = self._passes.gradient(weights, x, y, again=again)
        return Gradient(losses, logits, {ALL: gradients}, (weights, kept, x.shape[1]))

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        weights, kept, n = point
        v = self._passes.parts(vector[ALL])
        return {ALL: self._passes.hessian_vector(weights, kept, v, n, total=total)}


def _turned(weight: Tensor) -> Tensor:
    """Return a convolution's weight ``[F, C, 3, 3]`` in the kernels' order, others unchanged."""
    return weight.permute(2, 3, 1, 0) if weight.dim() == 4 else weight


def _turned_back(part: Tensor, size: torch.Size) -> Tensor:
    """Undo `_turned` for flat parts ``[…, numbers]``."""
    if len(size) < 4:
        return part.unflatten(-1, size)
    f, channels, *kernel = size
    return part.unflatten(-1, (*kernel, channels, f)).movedim((-1, -2), (-4, -3))
