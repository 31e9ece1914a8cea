"""Whether a network's answer to an example depends on which others stand in the same set.

By the statistics that it hands out it does, and says so. By anything else it may without a word: by
a mean over the set in its ``forward``, or attention from one example to another. Nobody can read
that off a network, but its outputs for a set and for parts of it tell.
"""

import torch
from torch import Tensor, nn

from maml.networks.calls import alone_with, apply
from maml.networks.loss import is_ours
from maml.networks.ordinary import Ordinary, switched, tensors
from maml.params import Params, in_float64

NUDGE = 0.1
"""How far parameters are moved: a gate that begins at zero lets nothing through where it begins."""


@torch.no_grad()
def mixes(network: nn.Module, x: Tensor) -> bool:
    """Say whether an example's outputs depend on others but by the statistics handed out.

    The set ``x [E, …]`` is compared with its halves, which are given its statistics. Networks of
    this project are known not to mix.
    """
    # Of a module that a user has made of torch's own, nothing is known.
    written_here = type(network).__module__.startswith("maml.networks.")
    if len(x) < 2 or (written_here and not isinstance(network, Ordinary) and is_ours(network)):
        return False
    # Not in training mode, in which dropout looks like it.
    with alone_with(network), switched(network, training=False):
        params, x = {name: tensor.cpu() for name, tensor in tensors(network).items()}, x.cpu()
        try:
            # In float64 a weak dependence stands out from rounding.
            exact = {name: in_float64(tensor) for name, tensor in params.items()}
            return _mixes(network, exact, in_float64(x))
        except RuntimeError:
            return _mixes(network, params, x)  # it has tensors of its own, of another dtype


def _mixes(network: nn.Module, params: Params, x: Tensor) -> bool:
    # Whatever is the same for all examples, as the brightest pixel, would hide what depends on it.
    if x.is_floating_point():
        x = x * torch.linspace(0.25, 1, len(x)).to(x).view(-1, *[1] * (x.dim() - 1))
    generator = torch.Generator().manual_seed(0)
    nudged = {
        name: p + NUDGE * torch.randn(p.shape, generator=generator).to(p)
        if p.is_floating_point()
        else p
        for name, p in params.items()
    }
    places = torch.arange(len(x), device=x.device)
    for at in (params, nudged):
        whole, used = apply(network, at, x)
        for half in (*places.tensor_split(2), places[::2], places[1::2]):
            if not _same(apply(network, at, x[half], used or None)[0], whole[half]):
                return True
    return False


def _same(a: Tensor, b: Tensor) -> bool:
    """Say whether two results ``[E, …]`` are equal but for how they were rounded."""
    # Each output by its own size: a large one, or one masked by -inf, must not hide the others.
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    a, b = (torch.where(finite, part, 0.0) for part in (a, b))
    scale = torch.maximum(a.abs().amax(0), b.abs().amax(0))
    spread = a.amax(0) - a.amin(0)
    eps = torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= eps**0.5 * spread + 100 * eps * scale).all())
