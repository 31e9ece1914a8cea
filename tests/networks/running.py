"""An ordinary network's running statistics, made those of one batch."""

import torch
from torch import Tensor, nn


def keep_statistics(peer: nn.Module, support: Tensor) -> None:
    """Make a network's running statistics those of the batch ``support``, its variances biased."""
    sizes: dict[nn.Module, int] = {}
    norms = [layer for layer in peer.modules() if isinstance(layer, nn.BatchNorm2d)]
    hooks = [
        norm.register_forward_hook(
            lambda layer, given, _: sizes.update({layer: given[0][:, 0].numel()})
        )
        for norm in norms
    ]
    for norm in norms:
        # 1 keeps the batch's own; torch keeps the unbiased variance, ours is biased.
        norm.momentum = 1.0
    with torch.no_grad():
        peer.train()(support)
    for norm, hook in zip(norms, hooks, strict=True):
        assert norm.running_var is not None
        norm.running_var *= (sizes[norm] - 1) / sizes[norm]
        hook.remove()
