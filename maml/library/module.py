"""A trained learner for plain torch: modules of its meta-parameters, and of what has adapted.

Shape legend: E examples.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from maml.errors import UserError
from maml.learners import Learner
from maml.learners.trees import tree
from maml.metagradient.differentiate import OuterGradient
from maml.networks.norms import tensors
from maml.networks.ordinary import own_name
from maml.params import Params


class _Parameters(nn.Module):
    """Parameters by name, in the memory that they are in; what ``.to`` moves is a copy then."""

    def __init__(self, learner: Learner, params: Params) -> None:
        super().__init__()
        made = tree(params)
        self._modules.update(made._modules)
        self._parameters.update(made._parameters)
        for name, parameter in self.named_parameters():
            parameter.data = params[name]
        # In a tuple: its own parameters are others, and none of this module's.
        self._learner = (learner,)

    def __repr__(self) -> str:
        """Tell what kind of layer each parameter is of: those here are names and tensors alone."""
        (learner,) = self._learner
        kinds = {path: type(layer).__name__ for path, layer in learner.named_modules()}
        kinds |= {
            path: type(each).__name__ for path, each in learner.network.named_modules() if path
        }
        lines = [type(self).__name__ + "("]
        for name, parameter in self.named_parameters():
            kind = kinds.get(name.rpartition(".")[0], "")
            lines.append(f"  {name}: {list(parameter.shape)}" + (f" of {kind}" if kind else ""))
        return "\n".join([*lines, ")"])


class MetaModule(_Parameters):
    """The meta-parameters as the parameters of a module, by the same names.

    They lie in the model's own memory: a step of any optimizer is a step of the model. What the run
    has frozen requires no gradient. Called with examples ``[E, …]`` it returns the network's
    outputs before any adaptation, normalised by these examples.
    """

    def __init__(self, learner: Learner, params: Params) -> None:
        super().__init__(learner, params)
        # A learner may be without the network's output layer, frozen or not.
        for name in {f"network.{name}" for name in learner.frozen} & params.keys():
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for ``x [E, …]``, which the parameters can be differentiated by."""
        (learner,) = self._learner
        return learner.call_network(unadapted(learner, dict(self.named_parameters())), x)[0]


class AdaptedModule(_Parameters):
    """The network after adaptation to one task, as a module with parameters of its own.

    Called with examples ``[E, …]`` it returns the network's outputs, normalised by these examples.
    Of a learner whose classifier is none of the network's (ProtoNet, R2D2, fine-tuning), they are
    no answers: those are `AdaptedModel.logits`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for ``x [E, …]``, which the parameters can be differentiated by."""
        (learner,) = self._learner
        return learner.call_network(dict(self.named_parameters()), x)[0]


def unadapted(learner: Learner, meta_params: Params) -> Params:
    """Return a network's parameters as the inner loop begins with them."""
    problem = learner.problem(meta_params, 0)
    return problem.params(problem.start, problem.last_step)


def own_names(learner: Learner, params: Params) -> Params:
    """Return copies, on the CPU, of a network's state, by the names that its author gave.

    That is its parameters, and the buffers that its ``state_dict`` has, which never change.

    Args:
        learner: Whose network it is.
        params: By this project's names; what is none of the network's is left out.
    """
    network = learner.network
    buffers = dict(network.named_buffers())
    saved = {name: buffers[name] for name in network.state_dict() if name in buffers}
    return {
        own_name(network, name): (saved | params)[name].detach().cpu().clone()
        for name in tensors(network)
        if name in params or name in saved
    }


def set_gradients(params: nn.Module | Params, found: OuterGradient) -> None:
    """Put the mean over tasks of a meta-gradient into ``.grad``, for an optimizer of torch.

    Args:
        params: What the gradient is by: a module, or ``{name: […]}``. A ``.grad`` that is there is
            replaced, so there is nothing to set to zero. A module's parameters that require no
            gradient get none.
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
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            continue
        mean = found.gradients[name] / len(found.losses)
        tensor.grad = mean.to(tensor.device, tensor.dtype)
