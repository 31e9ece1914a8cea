"""Helpers for tensors of one task or of B tasks. A shared tensor has no leading dimension B."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from maml.execution.meanwhile import QUIET

Tensors: TypeAlias = Sequence[Tensor | None]


def n_tasks_of(tensors: Tensors, ranks: Sequence[int]) -> int | None:
    """Return B if a tensor has a leading dimension B, else None."""
    for tensor, rank in zip(tensors, ranks, strict=True):
        if tensor is not None and tensor.dim() > rank:
            return len(tensor)
    return None


def of_tasks(tensor: Tensor, rank: int, n_tasks: int | None) -> Tensor:
    """Return ``tensor`` as ``[B, …]``, expanded if shared; without a B as ``[1, …]``."""
    return tensor if tensor.dim() > rank else tensor.expand(n_tasks or 1, *tensor.shape)


def batched(
    function: Callable[..., Any],
    info: Any,
    dims: Sequence[Any],
    inputs: Tensors,
    ranks: Sequence[int],
    *,
    singly: bool = False,
) -> tuple[Any, int]:
    """Batch ``function(again, *inputs)``, as the ``vmap`` rule of an autograd ``Function``.

    ``again``: the new dimension is computed entry by entry, because some inputs have a dimension B
    already, or ``singly`` is set.
    """
    found = [
        tensor if dim is None else tensor.movedim(dim, 0)  # type: ignore[union-attr]
        for tensor, dim in zip(inputs, dims, strict=True)
    ]
    again = singly or any(
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
    """Extend a function of one task: with tensors of B tasks it computes each task."""

    def call(*tensors: Tensor | None) -> Any:
        dims = [
            0 if tensor is not None and tensor.dim() > rank else None
            for tensor, rank in zip(tensors, ranks, strict=True)
        ]
        if all(dim is None for dim in dims):
            return function(*tensors)
        with QUIET:
            return torch.func.vmap(function, in_dims=tuple(dims))(*tensors)

    return call
