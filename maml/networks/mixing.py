"""Whether a network's answer to an example depends on which others stand in the same set.

By the statistics that it hands out it does, and says so. By anything else it may without a word: by
a mean over the set in its ``forward``, or attention from one example to another. Nobody can read
that off a network, but its outputs for a set and for parts of it tell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maml.networks.loss import apply, is_ours
from maml.params import Params

NUDGE = 0.1
"""How far parameters are moved: a gate that begins at zero lets nothing through where it begins."""


@torch.no_grad()
def mixes(network: nn.Module, params: Params, x: Tensor) -> bool:
    """Say whether an example's outputs depend on others but by the statistics handed out.

    The set is compared with its halves, which are given the whole set's statistics. Networks of
    this project are known not to mix.

    Args:
        network: By the protocol of `maml.networks`.
        params: What it is called with, ``{name: […]}``.
        x: Examples ``[E, …]`` of any data. Of one alone there is nothing to say: False.
    """
    if len(x) < 2 or is_ours(network):
        return False
    # Whatever is the same for all examples, as the brightest pixel, would hide what depends on it.
    x = x * torch.linspace(0.25, 1, len(x)).to(x).view(-1, *[1] * (x.dim() - 1))
    generator = torch.Generator().manual_seed(0)
    nudged = {
        name: p + NUDGE * torch.randn(p.shape, generator=generator).to(p)
        if p.is_floating_point()
        else p
        for name, p in params.items()
    }
    return any(_mixes_at(network, at, x) for at in (params, nudged))


def _mixes_at(network: nn.Module, params: Params, x: Tensor) -> bool:
    whole, used = apply(network, params, x)
    places = torch.arange(len(x), device=x.device)
    for halves in (places.tensor_split(2), (places[::2], places[1::2])):
        for half in halves:
            if not same(apply(network, params, x[half], used or None)[0], whole[half]):
                return True
    return False


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two results are equal but for how they were rounded."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return True  # nothing can be told
    scale = torch.stack([a.abs().max(), b.abs().max()]).max()
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * scale)
