"""Compiled derivatives of known losses. Which they are is told by the losses themselves.

A loss that is the mean cross-entropy of a `Conv4`'s outputs (`NetworkLoss`) is known; any other
object, even a function that wraps one, is not, and cannot meet a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from maml.kernels import library
from maml.kernels.derivatives import Derivatives, Gradient, Part, of_each_task
from maml.networks.conv4 import Conv4, ConvBlock
from maml.networks.loss import NetworkLoss
from maml.networks.statistics import BatchNorm
from maml.params import Params

if TYPE_CHECKING:
    from maml.kernels.native import NativeDerivatives

__all__ = ["Derivatives", "Gradient", "Part", "derivatives_of", "obstacle", "of_each_task"]


def derivatives_of(support: object, query: object) -> NativeDerivatives:
    """Return the compiled derivatives of two losses that have no `obstacle`."""
    from maml.kernels.native import NativeDerivatives

    assert isinstance(support, NetworkLoss)
    assert isinstance(support.network, Conv4)
    return NativeDerivatives(support.network)


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
    network = support.network
    if query.network is not network:
        return "support and query loss are of different networks"
    reason = _unknown(network)
    if reason:
        return reason
    if params.keys() != {name for name, _ in network.named_parameters()}:
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


_KNOWN = (Conv4, ConvBlock, BatchNorm, nn.ModuleList, nn.Conv2d, nn.Linear)


def _unknown(network: nn.Module) -> str | None:
    """Say what of a network is not as `Conv4` builds it."""
    if type(network) is not Conv4:
        return f"there are none for the network {type(network).__name__}"
    for name, module in network.named_modules():
        changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        if type(module) not in _KNOWN or changed:
            return f"{name or 'the network'} is not as Conv4 builds it"
    blocks = [block for block in network.blocks if isinstance(block, ConvBlock)]
    first = blocks[0].conv
    for block in blocks:
        conv = block.conv
        alike = all(
            getattr(conv, name) == getattr(first, name)
            for name in ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
        )
        alike = alike and conv.bias is not None and conv.padding_mode == "zeros"
        if not alike or block.norm.eps != blocks[0].norm.eps:
            return "its blocks differ"
    return None
