"""Find out whether a network's output for an example depends on the other examples of the set.

A dependence by batch statistics is visible, because the network returns the statistics. Any other
dependence is hidden: a mean over the set in ``forward``, or attention from one example to another.
To find it, we compare the network's outputs for a set with its outputs for parts of the set.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from maml.networks.calls import alone_with, apply
from maml.networks.loss import is_ours
from maml.networks.ordinary import Ordinary, switched, tensors
from maml.params import Params, in_float64

NUDGE = 0.1
"""How far parameters are moved, because a gate that begins at zero would hide a dependence."""


@torch.no_grad()
def mixes(network: nn.Module, x: Tensor) -> bool:
    """Return whether outputs depend on other examples in another way than by batch statistics.

    Outputs for the set ``x [E, …]`` are compared with outputs for its halves, which get the
    statistics of the set. Networks of this project do not mix, so they are not tested.
    """
    # A user's module may mix even if it consists of torch's layers only, so it is tested.
    written_here = type(network).__module__.startswith("maml.networks.")
    if len(x) < 2 or (written_here and not isinstance(network, Ordinary) and is_ours(network)):
        return False
    # Not in training mode, in which dropout looks like mixing.
    with alone_with(network), switched(network, training=False):
        params, x = {name: tensor.cpu() for name, tensor in tensors(network).items()}, x.cpu()
        try:
            # In float64 a weak dependence stands out from rounding.
            exact = {name: in_float64(tensor) for name, tensor in params.items()}
            return _mixes(network, exact, in_float64(x))
        except RuntimeError:
            return _mixes(network, params, x)  # the network has tensors of another dtype


def _mixes(network: nn.Module, params: Params, x: Tensor) -> bool:
    # Scale examples apart: a value that all share, as the brightest pixel, would hide mixing.
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
        # Copies, because a network may write into its buffers.
        whole, used = apply(network, tree_map(torch.clone, at), x)
        for half in (*places.tensor_split(2), places[::2], places[1::2]):
            part, _ = apply(network, tree_map(torch.clone, at), x[half], used or None)
            if not _same(part, whole[half]):
                return True
    return False


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two results ``[E, …]`` are equal up to rounding."""
    # Judge each output by its own size: a large or a -inf output must not hide the others.
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    a, b = (torch.where(finite, part, 0.0) for part in (a, b))
    scale = torch.maximum(a.abs().amax(0), b.abs().amax(0))
    spread = a.amax(0) - a.amin(0)
    eps = torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= eps**0.5 * spread + 100 * eps * scale).all())
