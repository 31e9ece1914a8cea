"""How B tasks are differentiated, as a batch or one by one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from maml.execution.meanwhile import QUIET

Batching: TypeAlias = Literal["vmap", "tasks"]
"""vmap: all tasks at once; tasks: one after the other, by plain autograd."""
Way: TypeAlias = Literal["auto", "reverse", "mixed"]
"""auto: reverse, but mixed with kernels, on a GPU, or if one task alone takes more than 16 steps;
mixed: back step by step."""


def n_tasks_of(tasks: Any) -> int:
    """Return B, the number of tasks."""
    return next(len(leaf) for leaf in pytree.tree_leaves(tasks) if isinstance(leaf, torch.Tensor))


def each_task(function: Callable[..., Any], batching: Batching) -> Callable[..., Any]:
    """Turn a function of one task into one of B tasks: arguments and results are ``[B, …]``."""
    if batching == "vmap":
        return QUIET(torch.func.vmap(function))

    def each(*arguments: Any) -> Any:
        return pytree.tree_map(_stacked, *(function(*own) for own in unstacked(arguments)))

    return each


def _stacked(*parts: Any) -> Any:
    """Stack the parts, one without a copy. What is no tensor (None, a size) stays as it is."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def unstacked(tasks: Any) -> Iterator[Any]:
    """Yield each of B tasks, a nest of tensors ``[B, …]``, without the leading dimension."""
    for i in range(n_tasks_of(tasks)):
        yield pytree.tree_map(lambda p, i=i: p[i] if isinstance(p, torch.Tensor) else p, tasks)


def one_by_one(tasks: Any) -> Iterator[Any]:
    """Yield each of B tasks as a batch of one, ``[1, …]``; a list contains such batches already."""
    if isinstance(tasks, list):
        yield from tasks
        return
    for i in range(n_tasks_of(tasks)):
        yield pytree.tree_map(lambda p, i=i: p[i : i + 1], tasks)


def alike(tasks: list[Any], places: Iterable[int]) -> list[list[int]]:
    """Return the places in groups of tasks of the same form, shapes and dtypes."""
    groups: dict[Any, list[int]] = {}
    for i in places:
        leaves, form = pytree.tree_flatten(tasks[i])
        shapes = tuple((part.shape, part.dtype) for part in leaves)
        groups.setdefault((form, shapes), []).append(i)
    return list(groups.values())


def joined(tasks: list[Any]) -> Any:
    """Join batches of one shape to one batch."""
    return pytree.tree_map(lambda *parts: torch.cat(parts), *tasks)
