"""Parameters by name: what learns, what adapts, and their gradients."""

from typing import TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype and shape, and hold the same numbers, be they nan."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.allclose(
        one, other, rtol=0.0, atol=0.0, equal_nan=True
    )


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor of floats in float64, others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def without_prefix(params: Params, prefix: str) -> Params:
    """Return those of ``params`` whose names begin with ``prefix``, without it."""
    return {
        name[len(prefix) :]: tensor for name, tensor in params.items() if name.startswith(prefix)
    }


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum over the first dimension, without a graph; it lies in memory as the rows do.

    Torch's own result is contiguous; where the rows are not, it takes tens of times as long.
    """
    if rows.is_sparse:
        return rows.detach().sum(0)
    return torch.sum(rows.detach(), 0, out=torch.empty_like(rows[0]))


class ParamLayout:
    """Where each parameter lies in one flat tensor: one operation or one message for all."""

    def __init__(self, params: Params) -> None:
        """Lay out ``params``, of one dtype, end to end in the order of their names as given."""
        self._shapes = {name: tensor.shape for name, tensor in params.items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.n_params = sum(self._sizes)
        self.dtype = next(iter(params.values())).dtype

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
