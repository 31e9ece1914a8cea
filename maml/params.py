"""Parameters by name: meta-parameters, adapted parameters, and their gradients."""

from typing import TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):  # every module that computes is here
    raise ImportError(f"maml needs torch 2.8 or newer; this one is {torch.__version__}")


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and numbers; nan equals nan."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.allclose(
        one, other, rtol=0.0, atol=0.0, equal_nan=True
    )


def in_float64(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float64, and any other tensor unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


def in_reals(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real numbers ``[…, 2]``, as torch's optimizers see it.

    Then gradients, inner optimizers and messages have real numbers alone. A tensor in bf16 is
    returned in float32, because most steps are smaller than bf16's rounding. Any other is
    unchanged.
    """
    if tensor.dtype == torch.bfloat16:
        return tensor.float()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def of_kind(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which `in_reals` has made ``tensor``: of the kind of ``like``."""
    if like.dtype == torch.bfloat16:
        return tensor.to(like.dtype)
    if not like.is_complex() or tensor.is_complex():
        return tensor
    return torch.complex(tensor[..., 0], tensor[..., 1])


def without_prefix(params: Params, prefix: str) -> Params:
    """Return the ``params`` whose names begin with ``prefix``, by names without the prefix."""
    return {
        name[len(prefix) :]: tensor for name, tensor in params.items() if name.startswith(prefix)
    }


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum over the first dimension, without a graph, in the rows' memory layout.

    Torch's default result is contiguous. If the rows are not, that takes tens of times as long.
    """
    if rows.is_sparse:
        return rows.detach().sum(0)
    return torch.sum(rows.detach(), 0, out=torch.empty_like(rows[0]))


class ParamLayout:
    """Places all parameters in one flat tensor, for one operation or one message for all."""

    def __init__(self, params: Params) -> None:
        """Lay out ``params``, which have one dtype, end to end in their given order."""
        self._shapes = {name: tensor.shape for name, tensor in params.items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.n_params = sum(self._sizes)

    def parts(self, params: Params) -> list[Tensor]:
        """Return views ``[p]`` of ``params``, detached, in the order of the layout."""
        return [params[name].detach().reshape(-1) for name in self._shapes]

    def params(self, params: Params) -> Tensor:
        """Return a new flat ``[P]`` tensor of ``params``, detached."""
        return torch.cat(self.parts(params))

    def to_params(self, flat: Tensor) -> Params:
        """Return views of ``flat [P]`` by name."""
        parts = zip(self._shapes.items(), flat.split(self._sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}
