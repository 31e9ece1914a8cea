"""A learner on its way over RPC: a clone by reference, whose parameters travel as one tensor."""

from __future__ import annotations

from typing import cast

import torch
import torchopt
from torch import Tensor

from maml.learners import Learner
from maml.params import Params
from maml.strategies.packing import Packing


class Reference:
    """What a call carries in place of a learner: its clone by reference, and one tensor, `flat`.

    Two facts of RPC stand behind it. An ``nn.Parameter`` is silently detached when it is pickled,
    so a module sent as it is trains nothing; a plain tensor travels with its place in the graph.
    And every tensor is a message part of its own and a node of the distributed graph: one with P
    elements costs a fraction of eighteen that add up to them.
    """

    def __init__(self, learner: Learner, packing: Packing) -> None:
        """Clone ``learner`` without its parameters, which `to` will say where to find."""
        self.packing = packing
        self.flat = torch.empty(0)
        self._clone: Learner = cast(
            Learner, torchopt.module_clone(learner, by="reference", detach_buffers=True)
        )
        for module in self._clone.modules():
            for name in module._parameters:
                module._parameters[name] = None

    def to(self, meta_params: Params) -> Tensor:
        """Point at ``meta_params`` as they are now; return them, ``[P]``, as a leaf of the graph.

        A call that carries this reference depends on that leaf, and brings home its gradient.
        """
        self.flat = self.packing.params(meta_params).requires_grad_()
        return self.flat

    def resolve(self) -> tuple[Learner, Params]:
        """Where the call has arrived: return the learner, and its meta-parameters in place.

        They are views without a graph: it is `flat` that leads home, from within the call. When
        its arguments are unpickled, not even that is part of the distributed graph yet.
        """
        modules = dict(self._clone.named_modules())
        params = self.packing.to_params(self.flat.detach())
        for name, tensor in params.items():
            path, _, attribute = name.rpartition(".")
            modules[path]._parameters[attribute] = tensor
        return self._clone, params
