"""Tensors of one task or of B, by their dimensions: one that tasks share has no leading B."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Sequence[Tensor | None]


def n_tasks_of(tensors: Tensors, ranks: Sequence[int]) -> int | None:
    """Return B if one of the tensors is of B tasks."""
    for tensor, rank in zip(tensors, ranks, strict=True):
        if tensor is not None and tensor.dim() > rank:
            return len(tensor)
    return None


def of_tasks(tensor: Tensor, rank: int, n_tasks: int | None) -> Tensor:
    """Return ``[B, …]`` of what is that or shared; without a B, of one task."""
    return tensor if tensor.dim() > rank else tensor.expand(n_tasks or 1, *tensor.shape)


def batched(
    function: Callable[..., Any],
    info: Any,
    dims: Sequence[Any],
    inputs: Tensors,
    ranks: Sequence[int],
) -> tuple[Any, int]:
    """Return what ``function(again, *inputs)`` does by ``torch.func.vmap``, as a rule of that.

    ``again``: whether some inputs are of B tasks already; then the rest is done one by one.
    """
    found = [
        tensor if dim is None else tensor.movedim(dim, 0)  # type: ignore[union-attr]
        for tensor, dim in zip(inputs, dims, strict=True)
    ]
    again = any(
        tensor is not None and tensor.dim() - (dim is not None) > rank
        for tensor, dim, rank in zip(inputs, dims, ranks, strict=True)
    )
    if not again:
        return function(False, *found), 0
    each = [
        function(True, *(t if d is None else t[i] for t, d in zip(found, dims, strict=True)))  # type: ignore[index]
        for i in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*each, strict=True))), 0


def of_each_task(function: Callable[..., Any], ranks: Sequence[int]) -> Callable[..., Any]:
    """Return a function of one task as one of B tasks, if it is called with any."""

    def call(*tensors: Tensor | None) -> Any:
        dims = [
            0 if tensor is not None and tensor.dim() > rank else None
            for tensor, rank in zip(tensors, ranks, strict=True)
        ]
        if all(dim is None for dim in dims):
            return function(*tensors)
        return torch.func.vmap(function, in_dims=tuple(dims))(*tensors)

    return call
