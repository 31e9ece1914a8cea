"""A trained learner for plain torch: a module of its meta-parameters, and its network's features.

Shape legend: E examples, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maml.errors import UserError
from maml.learners import Learner, base
from maml.learners.trees import tree
from maml.metagradient.differentiate import OuterGradient
from maml.networks.headless import head_prefix
from maml.networks.statistics import Statistics
from maml.params import Params


class MetaModule(nn.Module):
    """The meta-parameters as the parameters of a module, by the same names.

    They lie in the model's own memory: a step of any optimizer is a step of the model. (What
    ``.to`` or ``.double`` moves elsewhere is a copy from then on.) Called with examples ``[E, …]``
    it returns the network's outputs before any adaptation, normalised by these examples.
    """

    def __init__(self, learner: Learner, meta_params: Params) -> None:
        super().__init__()
        made = tree(meta_params)
        self._modules.update(made._modules)
        self._parameters.update(made._parameters)
        for name, parameter in self.named_parameters():
            parameter.data = meta_params[name]
        # In a tuple: its own parameters are others, and none of this module's.
        self._learner = (learner,)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for ``x [E, …]``, which the parameters can be differentiated by."""
        (learner,) = self._learner
        return learner.call_network(unadapted(learner, dict(self.named_parameters())), x)[0]


def unadapted(learner: Learner, meta_params: Params) -> Params:
    """Return a network's parameters as the inner loop begins with them."""
    problem = learner.problem(meta_params, 0)
    return problem.params(problem.start, problem.last_step)


@torch.no_grad()
def features(
    learner: Learner, params: Params, x: Tensor, statistics: Statistics | None = None
) -> tuple[Tensor, Statistics]:
    """Return what the output layer is given for ``x``, ``[E, F]``, and the statistics used.

    Args:
        learner: The learner, whose network it is.
        params: The network's parameters, by its own names.
        x: ``[E, …]``.
        statistics: What normalises ``x``; None: its own.

    Raises:
        UserError: if the network does not say which its output layer is, or does not call it once.
    """
    prefix = head_prefix(learner.network, f"the network {learner.config.network}")
    head = learner.network.get_submodule(prefix.rstrip("."))
    seen: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        seen.append((*given, *named.values())[0].flatten(1))

    hook = head.register_forward_pre_hook(look, with_kwargs=True)
    try:
        _, used = learner.call_network(params, x, statistics)
    finally:
        hook.remove()
    if len(seen) != 1:
        times = "does not call" if not seen else f"calls {len(seen)} times"
        raise UserError(
            f"the network {learner.config.network} {times} its output layer, "
            f"{prefix.rstrip('.')}: features are what it is given in one call"
        )
    return seen[0], used


def set_gradients(params: nn.Module | Params, found: OuterGradient | base.OuterGradient) -> None:
    """Put the mean over tasks of a meta-gradient into ``.grad``, for an optimizer of torch.

    Args:
        params: What the gradient is by: a module, or ``{name: […]}``. A ``.grad`` that is there is
            replaced, so there is nothing to set to zero.
        found: What `maml.meta_gradient` or `Model.meta_gradient` has returned: a sum over tasks.

    Raises:
        UserError: for other names or shapes.
    """
    own = dict(params.named_parameters()) if isinstance(params, nn.Module) else dict(params)
    strange: Any = own.keys() ^ found.gradients.keys()
    strange |= {n for n in own.keys() - strange if own[n].shape != found.gradients[n].shape}
    if strange:
        raise UserError(f"params: {min(strange)} is not in the gradient as it is in params")
    for name, tensor in own.items():
        mean = found.gradients[name] / len(found.losses)
        tensor.grad = mean.to(tensor.device, tensor.dtype)
