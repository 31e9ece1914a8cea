"""Treat the modules that a learner holds beside its network as those of the network."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from maml.networks.ordinary import to_buffers


def cast(learner: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters, and buffers of their types, to ``dtype``; leave others, as complex."""
    own = {p.dtype for p in learner.parameters() if p.is_floating_point()}
    learner._apply(lambda tensor: tensor.to(dtype) if tensor.dtype in own else tensor)


def complete(learner: nn.Module, dtype: torch.dtype) -> None:
    """Complete a learner whose subclass has added its own parts.

    What is frozen becomes a buffer. Norms use the batch's statistics in both modes, because tasks
    would share running statistics. Norms in evaluation mode keep theirs, which do not change.
    """
    cast(learner, dtype)
    named = learner.named_parameters(remove_duplicate=False)
    to_buffers(learner, [n for n, p in named if not (p.requires_grad or _of_network(n))])
    for name, part in learner.named_modules():
        if not isinstance(part, _NormBase) or _of_network(name):
            continue
        if part.training and part.running_mean is not None:
            part.running_mean = part.running_var = part.num_batches_tracked = None
            part.track_running_stats = False


def _of_network(name: str) -> bool:
    return name.partition(".")[0] == "network"
