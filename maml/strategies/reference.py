"""A learner on its way over RPC: a clone by reference, whose parameters travel by themselves."""

from typing import cast

import torch
import torchopt

from maml.learners import Learner
from maml.params import Params


class Reference:
    """What travels of a learner: its clone by reference, once a run, and without its parameters.

    These follow once a step, as one flat tensor. Two facts of RPC stand behind it. An
    ``nn.Parameter`` is silently detached when it is pickled, so a module sent as it is trains
    nothing; a plain tensor travels with its place in the graph. And every tensor is a message part
    of its own and a node of the distributed graph: one with P elements costs a fraction of eighteen
    that add up to them.
    """

    def __init__(self, learner: Learner) -> None:
        """Clone ``learner``, and leave its parameters out."""
        self._clone: Learner = cast(
            Learner, torchopt.module_clone(learner, by="reference", detach_buffers=True)
        )
        for module in self._clone.modules():
            for name in module._parameters:
                module._parameters[name] = None
        self.hold_buffers(torch.device("cpu"))

    def hold_buffers(self, device: torch.device) -> None:
        """Move the buffers: CPU tensors cross RPC, and a worker computes on its own device."""
        self._clone.hold_buffers(device)

    def put(self, params: Params) -> Learner:
        """Where it has arrived: return the learner with ``params`` in place, by name."""
        modules = dict(self._clone.named_modules())
        for name, tensor in params.items():
            path, _, attribute = name.rpartition(".")
            modules[path]._parameters[attribute] = tensor
        return self._clone
