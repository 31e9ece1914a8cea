"""Tensors of one task or of B, by their dimensions: one that tasks share has no leading B."""

import math
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


def merge(
    info: Any, in_dims: Sequence[int | None], inputs: Tensors, ranks: Sequence[int]
) -> tuple[list[Tensor | None], Callable[[Tensor], Tensor], list[bool]]:
    """Return inputs that are batched once more as those of more tasks, all along one dimension.

    Also what takes results apart again, and which inputs were of tasks before.
    """
    before = [
        tensor is not None and tensor.dim() - (dim is not None) > rank
        for tensor, dim, rank in zip(inputs, in_dims, ranks, strict=True)
    ]
    found = [
        tensor if tensor is None or dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(inputs, in_dims, strict=True)
    ]
    if not any(before):
        return found, lambda result: result, before
    within = next(
        tensor.shape[dim is not None]
        for tensor, dim, own in zip(found, in_dims, before, strict=True)
        if own and tensor is not None
    )
    size = info.batch_size, within
    for i, (tensor, dim, own) in enumerate(zip(found, in_dims, before, strict=True)):
        if tensor is None or (dim is None and not own):
            continue
        if not own:
            tensor = tensor.unsqueeze(1)
        one = tensor.shape[(dim is not None) + 1 :] if own else tensor.shape[2:]
        found[i] = tensor.expand(*size, *one).reshape(math.prod(size), *one)
    return found, lambda result: result.unflatten(0, size), before


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
