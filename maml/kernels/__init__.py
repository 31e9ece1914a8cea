"""Compiled derivatives of known losses. Which they are is told by the losses themselves.

A loss that is the mean cross-entropy of a `Conv4`'s outputs (`NetworkLoss`) is known, and one of
its features (`FeatureLoss`) where nothing adapts, and the first at weights that other parameters
make (`ModulatedLoss`); any other object, even a function that wraps one,
is not, and cannot meet a kernel.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from maml.kernels import library
from maml.kernels.derivatives import Derivatives, Gradient, Native, Part, of_each_task
from maml.networks.conv4 import Conv4
from maml.networks.feature_loss import FeatureLoss
from maml.networks.headless import without_head
from maml.networks.loss import NetworkLoss
from maml.networks.modulated_loss import ModulatedLoss
from maml.networks.norms import tensors
from maml.networks.ordinary import Ordinary
from maml.params import Params

__all__ = [
    "Derivatives",
    "Gradient",
    "Native",
    "Part",
    "derivatives_of",
    "obstacle",
    "of_each_task",
]

_DO_NOT = "the compiled kernels do not serve this, as"
"""What reasons begin with that are a fact of the losses or of the network."""


def derivatives_of(support: object | None, query: object, start: Params) -> Native:
    """Return the compiled derivatives of losses that have no `obstacle`; ``start`` adapts."""
    if isinstance(query, FeatureLoss):
        from maml.kernels.features import NativeFeatures

        return NativeFeatures(query)
    from maml.kernels.modulated import NativeModulated
    from maml.kernels.native import NativeDerivatives

    plain_support, plain = _plain(support), _plain(query)
    assert isinstance(plain, NetworkLoss)
    assert isinstance(plain.network, Conv4)
    batches = plain_support.batches if isinstance(plain_support, NetworkLoss) else None
    native = NativeDerivatives(plain.network, batches)
    if isinstance(query, ModulatedLoss):
        return NativeModulated(query, native, frozenset(start))
    return native


def obstacle(support: object | None, query: object, params: Params) -> str | None:
    """Say why the kernels cannot serve the losses of ``params``, or return None.

    Args:
        support: The support loss; None if there is no step that descends it.
        query: The query loss.
        params: All that the losses read, ``{name: […]}``.
    """
    of_features = support is None and isinstance(query, FeatureLoss)
    modulates = isinstance(query, ModulatedLoss)
    reason = None if of_features else _modulated_otherwise(support, query)
    support, query = _plain(support), _plain(query)
    reason = reason or (None if of_features else _not_plain(support, query))
    if reason:
        return f"{_DO_NOT} {reason}"
    assert isinstance(query, (NetworkLoss, FeatureLoss))
    if query.precision == "bf16":
        return "the compiled kernels compute in float32, not in --precision bf16"
    network = query.network
    reason = _unknown(network, headless=of_features)
    if reason:
        return reason
    weights = tensors(network).keys()
    if not (weights <= params.keys() if of_features or modulates else weights == params.keys()):
        return f"{_DO_NOT} the losses read other parameters than the network's"
    sample = params[next(iter(weights))]
    if sample.device.type != "cpu":
        return f"the compiled kernels run on the CPU, not on --device {sample.device.type}"
    lanes = library.lanes(sample.element_size())
    if lanes is None:
        return f"the kernels could not be compiled: {library.failure()}"
    assert isinstance(network, Conv4)
    from maml.kernels import smoke

    if wrong := smoke.fault():
        return wrong
    filters = network.filters
    if filters % lanes:
        return f"{_DO_NOT} --filters {filters} is no multiple of {lanes}, this machine's vector"
    return None


def _plain(loss: object | None) -> object | None:
    return loss.plain if isinstance(loss, ModulatedLoss) else loss


def _modulated_otherwise(support: object | None, query: object) -> str | None:
    """Say whether support and query loss make the network's weights in different ways."""
    if support is None:
        return None
    by_support, by_query = (
        loss.modulated if isinstance(loss, ModulatedLoss) else None for loss in (support, query)
    )
    return None if by_support == by_query else "support and query loss modulate differently"


def _not_plain(support: object | None, query: object) -> str | None:
    """Say which of the losses is not the cross-entropy of one network."""
    stated = {"query": query} if support is None else {"support": support, "query": query}
    for part, loss in stated.items():
        if not isinstance(loss, NetworkLoss):
            return f"the {part} loss is the learner's own"
        if loss.part != part:
            return f"the {part} loss is of the {loss.part} set"
        if loss.loss is not F.cross_entropy:
            return f"the {part} loss is not the cross-entropy"
    assert isinstance(query, NetworkLoss)
    if query.batches is not None:
        return "the query loss is of a part of the set"
    if isinstance(support, NetworkLoss):
        if support.network is not query.network:
            return "support and query loss are of different networks"
        if support.precision != query.precision:
            return "support and query loss are of different precisions"
    return None


def _unknown(network: nn.Module, *, headless: bool) -> str | None:
    """Say what of a network is not as `Conv4` builds it, with its head or without."""
    if type(network) is not Conv4:
        stated = network.module if isinstance(network, Ordinary) else network
        return f"there are no compiled kernels for the network {type(stated).__name__}"
    built = _as_built(
        network.image_shape, network.ways, network.filters, network.pool, network.mean,
        network.leak, network.eps, headless,
    )  # fmt: skip
    found = _described(network)
    for name, description in found.items():
        if built.get(name) != description:
            return f"{_DO_NOT} {name or 'the network'} is not as Conv4 builds it"
    same = found.keys() == built.keys()
    return None if same else f"{_DO_NOT} the network has other layers than Conv4 builds"


@functools.cache
def _as_built(
    image_shape: tuple[int, int, int],
    ways: int,
    filters: int,
    pool: bool,
    mean: bool,
    leak: float,
    eps: float,
    headless: bool,
) -> dict[str, object]:
    with torch.device("meta"):
        network = Conv4(
            image_shape, ways, filters=filters, pool=pool, mean=mean, leak=leak, norm_eps=eps
        )
        if headless:
            without_head(network, "conv4")
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
            getattr(module, "mean", None),
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
