"""Compiled derivatives of known losses. Which they are is told by the losses themselves.

A loss that is the mean cross-entropy of a `Conv4`'s outputs (`NetworkLoss`) is known; any other
object, even a function that wraps one, is not, and cannot meet a kernel.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from maml.kernels import library
from maml.kernels.derivatives import Derivatives, Gradient, Part, of_each_task
from maml.networks.conv4 import Conv4
from maml.networks.loss import NetworkLoss
from maml.networks.norms import tensors
from maml.networks.ordinary import Ordinary
from maml.params import Params

if TYPE_CHECKING:
    from maml.kernels.native import NativeDerivatives

__all__ = ["Derivatives", "Gradient", "Part", "derivatives_of", "obstacle", "of_each_task"]


def derivatives_of(support: object, query: object) -> NativeDerivatives:
    """Return the compiled derivatives of two losses that have no `obstacle`."""
    from maml.kernels.native import NativeDerivatives

    assert isinstance(support, NetworkLoss)
    assert isinstance(support.network, Conv4)
    return NativeDerivatives(support.network, support.batches)


def obstacle(support: object, query: object, params: Params) -> str | None:
    """Say why the kernels cannot serve two losses of ``params``, or return None."""
    for part, loss in (("support", support), ("query", query)):
        if not isinstance(loss, NetworkLoss):
            return f"the {part} loss is the learner's own"
        if loss.part != part:
            return f"the {part} loss is of the {loss.part} set"
        if loss.loss is not F.cross_entropy:
            return f"the {part} loss is not the cross-entropy"
        if loss.precision == "bf16":
            return "they compute in float32, not in --precision bf16"
    assert isinstance(support, NetworkLoss)
    assert isinstance(query, NetworkLoss)
    if query.batches is not None:
        return "the query loss is of a part of the set"
    network = support.network
    if query.network is not network:
        return "support and query loss are of different networks"
    reason = _unknown(network)
    if reason:
        return reason
    if params.keys() != tensors(network).keys():
        return "the losses read other parameters than the network's"
    sample = next(iter(params.values()))
    if sample.device.type != "cpu":
        return f"they run on the CPU, not on --device {sample.device.type}"
    lanes = library.lanes(sample.element_size())
    if lanes is None:
        return f"they could not be compiled: {library.failure()}"
    assert isinstance(network, Conv4)
    filters = network.filters
    if filters % lanes:
        return f"--filters {filters} is no multiple of {lanes}, this machine's vector"
    return None


def _unknown(network: nn.Module) -> str | None:
    """Say what of a network is not as `Conv4` builds it."""
    if type(network) is not Conv4:
        stated = network.module if isinstance(network, Ordinary) else network
        return f"there are none for the network {type(stated).__name__}"
    built = _as_built(
        network.image_shape, network.ways, network.filters, network.pool, network.leak, network.eps
    )
    found = _described(network)
    for name, description in found.items():
        if built.get(name) != description:
            return f"{name or 'the network'} is not as Conv4 builds it"
    return None if found.keys() == built.keys() else "it has other layers than Conv4 builds"


@functools.cache
def _as_built(
    image_shape: tuple[int, int, int], ways: int, filters: int, pool: bool, leak: float, eps: float
) -> dict[str, object]:
    with torch.device("meta"):
        network = Conv4(image_shape, ways, filters=filters, pool=pool, leak=leak, norm_eps=eps)
        return _described(network)


def _described(network: nn.Module) -> dict[str, object]:
    """Return what each module of a network computes with, by its name."""
    # Layers that are shared under two names appear once.
    return {
        name: (
            type(module),
            module.extra_repr(),
            getattr(module, "eps", None),
            getattr(module, "pool", None),
            getattr(module, "leak", None),
            tuple(
                (name, tuple(tensor.shape))
                for name, tensor in sorted((module._parameters | module._buffers).items())
                if tensor is not None
            ),
            bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)),
        )
        for name, module in network.named_modules()
    }
