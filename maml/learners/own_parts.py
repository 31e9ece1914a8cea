"""Treat the modules that a learner holds beside its network as those of the network."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from maml.networks.ordinary import to_buffers


def cast(learner: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters, and buffers of their types, to ``dtype``; leave others, as complex."""
    own = {parameter.dtype for parameter in learner.parameters()}
    learner._apply(lambda tensor: tensor.to(dtype) if tensor.dtype in own else tensor)


def complete(learner: nn.Module, dtype: torch.dtype) -> None:
    """Complete a learner whose subclass has added its own parts.

    What is frozen becomes a buffer. Norms use the batch's statistics in both modes, because tasks
    would share running statistics. Norms in evaluation mode keep theirs, which do not change.
    """
    cast(learner, dtype)
    frozen = [n for n, p in learner.named_parameters() if not p.requires_grad]
    to_buffers(learner, [name for name in frozen if not name.startswith("network.")])
    for part in learner.modules():
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            part.running_mean = part.running_var = part.num_batches_tracked = None
            part.track_running_stats = False
