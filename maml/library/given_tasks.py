"""Tasks as people have them, as a list of tasks."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.errors import UserError

Parts: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
GivenTasks: TypeAlias = Task | Parts | Sequence[Task | Parts]
"""Tensors with a leading task dimension, or a list of tasks."""

FORM = (
    "give (support_x, support_y, query_x, query_y) with a leading task dimension, or a list of "
    "such tuples without it"
)


def as_tasks(given: Any, dtype: torch.dtype, *, leaves: bool = True) -> list[Task]:
    """Return tasks as batches of one each: tensors ``[1, E, …]``.

    Floats must be of ``dtype``, as the module's parameters are. Tensors that require a gradient are
    refused unless there may be others than ``leaves``.
    """
    try:
        items = list(_by_name(given))
    except TypeError:
        raise UserError(f"tasks is a {type(given).__name__}; {FORM}") from None
    if not items:
        raise UserError(f"tasks is empty; {FORM}")
    if all(isinstance(part, Tensor) for part in items):
        whole = _task(items, "tasks")
        if min(part.dim() for part in whole) < 2 or len({len(part) for part in whole}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in whole)
            raise UserError(f"tasks: its tensors are {shapes}; {FORM}")
        parts = [part.split(1) for part in whole]
        tasks = [Task(*of_task) for of_task in zip(*parts, strict=True)]
    else:
        found = (_task(item, f"task {i}") for i, item in enumerate(items))
        tasks = [Task(*(part[None] for part in task)) for task in found]
    for i, task in enumerate(tasks):
        _check(f"task {i}", task, dtype, leaves)
    return tasks


def _by_name(given: Any) -> Any:
    """Return the parts of what has them by name, as a dictionary or a named tuple, in order."""
    named = given if isinstance(given, Mapping) else getattr(given, "_asdict", dict)()
    return [named[n] for n in Task._fields] if named.keys() >= {*Task._fields} else given


def _task(item: Any, what: str) -> Task:
    try:
        parts = list(_by_name(item))
    except TypeError:
        parts = [item]
    if len(parts) != 4 or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts[:6])
        raise UserError(f"{what} is ({kinds}); {FORM}")
    return Task(*parts)


def _check(what: str, task: Task, dtype: torch.dtype, leaves: bool) -> None:
    for name, tensor in task._asdict().items():
        if leaves and tensor.requires_grad:
            raise UserError(
                f"{what}: {name} requires a gradient, which a meta-gradient is not taken by: "
                "detach it; or take an outer loss of your own by adapt()"
            )
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise UserError(
                f"{what}: {name} is {tensor.dtype}, and the module's parameters are {dtype}; "
                "give both as one dtype"
            )
    for part, x, y in (("support", *task[:2]), ("query", *task[2:])):
        if x.shape[:2] != y.shape[:2]:
            counts = f"{part}_x has {x.shape[1]} examples, and {part}_y {y.shape[1]} targets"
            raise UserError(f"{what}: {counts}")
    if not task.query_x.shape[1]:
        raise UserError(f"{what}: query_x is empty: the outer loss is of its examples")


def ways_of(i: int, task: Task) -> int:
    """Return how many classes task ``i`` has, whose learner tells any number apart."""
    for name, y in (("support_y", task.support_y), ("query_y", task.query_y)):
        if y.is_floating_point() or y.dim() != 2:
            raise UserError(
                f"task {i}: {name} is {y.dtype} {list(y.shape[1:])}; give the number of each "
                "example's class, integers [E]"
            )
    known, asked = set(task.support_y[0].tolist()), set(task.query_y[0].tolist())
    missing = (set(range(1 + int(max(known)))) | asked) - known
    if missing or min(known) < 0:
        raise UserError(f"task {i}: support_y has no example of class {min(missing | known)}")
    return len(known)


def check_labels(
    what: str, y: Tensor, classes: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Refuse labels that are no class, and that the loss does not take as ones to ignore."""
    strange = y[(y < 0) | (y >= classes)][:1]
    if not len(strange):
        return
    with contextlib.suppress(Exception):  # as one that is to be ignored
        loss(torch.zeros(1, classes), strange.cpu())
        return
    raise UserError(
        f"{what} has the label {int(strange)}; the module tells {classes} classes apart, with "
        f"labels from 0 to {classes - 1}"
    )
