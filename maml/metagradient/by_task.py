"""How B tasks are differentiated, as a batch or one by one."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

Batching: TypeAlias = Literal["vmap", "tasks"]
"""vmap: all tasks at once; tasks: one after the other, by plain autograd."""
Way: TypeAlias = Literal["auto", "reverse", "mixed"]
"""auto: mixed with kernels or on a GPU, else reverse; mixed: back step by step."""


def n_tasks_of(tasks: Any) -> int:
    """Return B, the number of tasks."""
    return len(pytree.tree_leaves(tasks)[0])


def each_task(function: Callable[..., Any], batching: Batching) -> Callable[..., Any]:
    """Turn a function of one task into one of B tasks: arguments and results are ``[B, …]``."""
    if batching == "vmap":
        return torch.func.vmap(function)

    def each(*arguments: Any) -> Any:
        found = [function(*own) for own in unstacked(arguments)]
        if len(found) == 1:  # without a copy
            return pytree.tree_map(lambda part: part[None], found[0])
        return pytree.tree_map(lambda *parts: torch.stack(parts), *found)

    return each


def unstacked(tasks: Any) -> Iterator[Any]:
    """Yield each of B tasks, a nest of tensors ``[B, …]``, without the leading dimension."""
    for i in range(n_tasks_of(tasks)):
        yield pytree.tree_map(lambda tensor, i=i: tensor[i], tasks)


def one_by_one(tasks: Any) -> Iterator[Any]:
    """Yield each of B tasks as a batch of one, ``[1, …]``; a list contains such batches already."""
    if isinstance(tasks, list):
        yield from tasks
        return
    for task in unstacked(tasks):
        yield pytree.tree_map(lambda tensor: tensor[None], task)
