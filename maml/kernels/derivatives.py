"""A loss's derivatives for B tasks at once, from which forward-over-reverse is built.

`maml.metagradient.function` computes them by torch, for any loss. The compiled derivatives
(`maml.metagradient.native`) must give equal results.

Shape legend: B tasks, E examples of a set.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from maml.params import Params

Part: TypeAlias = Literal["support", "query"]


class Gradient(NamedTuple):
    """A loss and its first derivative, per task.

    Attributes:
        losses: ``[B]``.
        outputs: ``[B, …]``, or a nest of such: what the loss returns in addition to its value.
        gradients: ``{name: [B, …]}``.
        point: The data that `Derivatives.hessian_vector` needs about these parameters.
    """

    losses: Tensor
    outputs: Any
    gradients: Params
    point: Any


class Derivatives:
    """The derivatives of an inner problem's losses by its parameters, for B tasks at once.

    ``alone``: a batch is one task, which is computed without batching.
    """

    alone = False

    def laid_out(self, params: Params) -> Params:
        """Return the same parameters, in the memory order that is the fastest here."""
        return params

    def gradient(self, part: Part, at: Params, tasks: Any, step: int, *, again: bool) -> Gradient:
        """Return losses, outputs and gradients.

        Args:
            part: The support loss, whose gradient covers the parameters that adapt, or the query
                loss, whose gradient covers all parameters.
            at: ``{name: [B, …]}``; a tensor that tasks share is expanded over B (stride 0).
            tasks: B tasks.
            step: The inner step that the losses receive.
            again: Whether the caller will call `hessian_vector` at this point.
        """
        raise NotImplementedError

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """Return the derivative of ``<gradient, vector>`` by all parameters at ``point``.

        ``vector {name: [B, …]}`` has the names of the gradient. The result ``{name: [B, …]}`` has
        all parameters; with ``total`` it is the sum over tasks, ``{name: […]}``. A call uses up the
        point, unless ``again`` announces another call.
        """
        raise NotImplementedError
