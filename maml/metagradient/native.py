"""The compiled derivatives of losses that are the plain cross-entropy of a `Conv4`.

A `Conv4` uses compiled kernels in every model (`maml.networks.stack`). For this one loss, the head
is compiled, too, and a step is one call. Only known losses allow this, so this module inspects the
losses.

Shape legend: B tasks, E examples, N ways.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.tasks import Task
from maml.kernels.convnet import convnet, lay_out
from maml.metagradient.function import Derivatives, Gradient, Part
from maml.metagradient.problem import Problem
from maml.networks.conv4 import Conv4
from maml.networks.loss import MiniBatches, NetworkLoss, part_of
from maml.networks.ordinary import is_hooked, tensors
from maml.params import Params

IGNORED = -100
"""The label that `F.cross_entropy` ignores (its ``ignore_index``); the kernels know no such."""


def native(problem: Problem, tasks: Any, *, heads: bool = False) -> NativeDerivatives | None:
    """Return the compiled derivatives of a problem's losses, or None for losses of another kind.

    Return None, too, for images of another size, for a set with one value a channel, for targets
    ``[B, E]`` that are not int64, and if a label is the one that cross-entropy ignores.
    ``heads``: also where only the output layer moves, although its features could be cached.
    """
    support, query = problem.support, problem.query
    batches = support if isinstance(support, MiniBatches) else None
    if batches is not None:
        support = batches.loss
    if not isinstance(query, NetworkLoss):
        return None
    network = query.network
    if query != NetworkLoss(network, "query", F.cross_entropy):
        return None
    adapts = problem.steps or problem.implicit is not None
    if adapts and support != NetworkLoss(network, "support", F.cross_entropy):
        return None
    if type(network) is not Conv4 or not _has_its_head(network):
        return None
    params = problem.params(problem.start, 0)
    some = next(iter(params.values()))
    # The network's own weights may be on the CPU: asked first, it would compile for nothing.
    if not some.is_cpu or network.why_torch():
        return None
    if params.keys() != tensors(network).keys():
        return None
    once = problem.steps and not problem.displacement and batches is None
    moving = params.keys() - problem.fixed.keys()
    if once and not heads and all(name.startswith(network.head_prefix) for name in moving):
        return None
    if some.dtype != network.head.weight.dtype:
        return None
    for x, y in (part_of(tasks, part) for part in ("support", "query")):
        fits = x.shape[2:] == network.image_shape and y.dtype == torch.int64 and y.dim() == 2
        fits = fits and x.shape[1] * network.least != 1  # torch's way refuses one value a channel
        if not fits or (y == IGNORED).any():
            return None
    return NativeDerivatives(problem, network, batches)


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
    """The same as `Derivatives`, by kernels."""

    def __init__(
        self, problem: Problem, network: Conv4, batches: MiniBatches | None = None
    ) -> None:
        """``batches``: which examples the support loss sees; None: all."""
        super().__init__(problem)
        self._passes, self._batches = convnet(network.shape(network.ways)), batches
        self._names = [name for name in tensors(network) if not name.endswith("conv.bias")]

    def laid_out(self, params: Params) -> Params:
        """See `Derivatives.laid_out`."""
        return {name: lay_out(t) if t.dim() == 4 else t for name, t in params.items()}

    def _named(self, found: list[Tensor], like: Params) -> Params:
        """Return derivatives by name; no loss depends on a convolution's bias."""
        of_kernels = dict(zip(self._names, found, strict=True))
        return {
            name: of_kernels[name] if name in of_kernels else torch.zeros_like(tensor)
            for name, tensor in like.items()
        }

    def gradient(self, part: Part, at: Params, tasks: Task, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`; the tasks are classification tasks."""
        x, y = part_of(tasks, part)
        if part == "support" and self._batches is not None:
            places = self._batches.places(step, y.shape[1])
            x, y = x[:, places], y[:, places]
        weights = [at[name] for name in self._names]
        losses, logits, found, kept = self._passes.gradient(weights, x, y, again=again)
        gradients = self._named(found, at)
        if part == "support":
            gradients = {name: gradients[name] for name in self._moving}
        return Gradient(losses, logits, gradients, (at, kept, x.shape[1]))

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, scale: float = 1.0, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        at, kept, n = point
        weights = [at[name] for name in self._names]
        # What does not adapt has no direction.
        v = [vector[n] if n in vector else torch.zeros_like(at[n][0]) for n in self._names]
        found = self._passes.hessian_vector(weights, kept, v, n, total=total)
        torch._foreach_mul_(found, scale)
        return self._named(found, {n: t[0] for n, t in at.items()} if total else at)
