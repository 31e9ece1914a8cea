"""What forward-over-reverse meta-gradients are made of: a loss's derivatives, for B tasks at once.

`maml.metagradient.function` derives them from any loss by ``torch.func``; the compiled ones must
equal it.

Shape legend: B tasks, E examples of a set.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from maml.params import Params

Part: TypeAlias = Literal["support", "query"]


class Gradient(NamedTuple):
    """A loss and its first derivative, per task.

    Attributes:
        losses: ``[B]``.
        outputs: ``[B, …]``, or a nest of such: what the loss returns beside its value.
        gradients: ``{name: [B, …]}``, in the derivatives' own coordinates.
        point: What `Derivatives.hessian_vector` needs to know of where this was taken.
    """

    losses: Tensor
    outputs: Any
    gradients: Params
    point: Any


class Derivatives:
    """The losses of an inner problem as functions of its parameters, for B tasks at once.

    Parameters, gradients and vectors are in coordinates of its own: the same numbers under names
    and shapes that suit it, so that arithmetic element by element means the same in them. Here they
    are the problem's own names.

    Attributes:
        whole: Whether the gradient of the support loss is that by every parameter. Otherwise it is
            by those that adapt alone, under their own names.
        alone: Whether a batch is of one task, of which nothing is batched.
        absent: Names of parameters without coordinates, as no loss depends on them.
    """

    whole = alone = False
    absent: Collection[str] = ()

    def enter(self, params: Params) -> Params:
        """Return parameters ``{name: […]}``, all of a problem's, in its own coordinates."""
        return params

    def leave(self, gradients: Params) -> Params:
        """Return gradients in its own coordinates by the problem's names ``{name: […]}``."""
        return gradients

    def put(self, at: Params, params: Params) -> Params:
        """Return ``at {name: [B, …]}`` with ``params {name: […]}``, which all tasks share."""
        return at | of_each_task(params, len(next(iter(at.values()))))

    def gradient(self, part: Part, at: Params, tasks: Any, step: int, *, again: bool) -> Gradient:
        """Return losses, outputs and gradients.

        Args:
            part: Which loss: the support loss, or the query loss, whose gradient is that by all.
            at: ``{name: [B, …]}``; what tasks share is expanded over B (stride 0).
            tasks: B tasks.
            step: As the losses take it.
            again: Whether `hessian_vector` will be asked for at this point.
        """
        raise NotImplementedError

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """Return the derivative of the gradient by all parameters at ``point`` along ``vector``.

        ``vector {name: [B, …]}`` has the names of the gradient; ``{name: [B, …]}`` comes back, of
        all parameters, or with ``total`` its sum over tasks, ``{name: […]}``. The point is then
        used up, unless it will be asked for ``again``.
        """
        raise NotImplementedError


def of_each_task(params: Params, n_tasks: int) -> Params:
    """Return what B tasks share as ``{name: [B, …]}``, without a copy (stride 0)."""
    return {name: tensor.expand(n_tasks, *tensor.shape) for name, tensor in params.items()}
