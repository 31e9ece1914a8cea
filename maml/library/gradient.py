"""``maml.meta_gradient``: of a user's own problem, however its tasks may be computed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.metagradient import differentiate
from maml.metagradient.batching import batching_of
from maml.metagradient.by_task import Batching
from maml.metagradient.differentiate import Kernels, OuterGradient, Way
from maml.metagradient.problem import Problem
from maml.params import Params

TRIED = 3
"""Tasks on which a problem is computed in both ways before it is batched."""
KNOWN = 32
"""Problems that are remembered, the latest ones; what their losses hold stays in memory."""
_KNOWN: OrderedDict[Any, Batching] = OrderedDict()
HELD = 100
"""Of what an object or a container holds, so many are looked at."""
_MAY_DIFFER = (nn.Module, FunctionType, MethodType, functools.partial, dict, list, tuple)


def meta_gradient(
    state: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    allowed: Kernels = "auto",
    batching: Literal["auto", "vmap", "tasks"] = "auto",
) -> OuterGradient:
    """Differentiate the outer loss summed over B tasks by meta-parameters.

    Args:
        state: What states the problem, given meta-parameters; it may compute the problem's tensors
            from them by any differentiable function.
        meta_params: ``{name: […]}``; not changed.
        tasks: A `datasets.tasks.Task` of B tasks, or any nest of tensors ``[B, …]``.
        way: auto, reverse (through the whole inner loop) or mixed (back step by step, so that
            memory does not grow with the steps). No result depends on it beyond rounding.
        allowed: "torch" leaves compiled kernels out.
        batching: How tasks are computed where no kernels serve: "vmap" all at once, "tasks" one
            after the other, as a plain loop does. auto: "vmap" where it gives what a loop gives, on
            some tasks of the first call of a problem with two or more.

    Raises:
        RuntimeError: for a meta-parameter that no tensor of the problem depends on, and for a
            parameter that no loss reads: mistakes, not zeros.
        ValueError: for losses that draw random numbers or count their calls, and for a
            `datasets.tasks.Task` that is not a batch.
    """
    if isinstance(tasks, Task) and tasks.support_y.dim() < 2:
        raise ValueError("tasks is a single task, not a batch of tasks: take episodes.tasks([0])")
    if batching == "auto":
        batching = _batching_of(state, meta_params, tasks, way, allowed)
    return differentiate.meta_gradient(state, meta_params, tasks, way, allowed, None, batching)


def _batching_of(
    state: Callable[[Params], Problem], meta_params: Params, tasks: Any, way: Way, allowed: Kernels
) -> Batching:
    problem = state(meta_params)
    leaves, spec = pytree.tree_flatten(tasks)
    stated = (problem.support, problem.query, problem.transform and problem.transform.function)
    kinds = tuple((leaf.dim(), leaf.dtype, leaf.device) for leaf in leaves)
    key = (*map(_identity, stated), problem.optimizer, kinds, str(spec), way, allowed)
    if key in _KNOWN:
        _KNOWN.move_to_end(key)
        return _KNOWN[key]
    if len(leaves[0]) < 2:
        return "tasks"  # one task does not tell
    some = pytree.tree_map(lambda tensor: tensor[:TRIED], tasks)
    _KNOWN[key] = batching_of(state, meta_params, some, way, allowed)
    if len(_KNOWN) > KNOWN:
        _KNOWN.popitem(last=False)
    return _KNOWN[key]


def _identity(loss: Any) -> tuple[Any, ...]:
    """Return what tells a loss from others: its code and the objects that it reads, not the data.

    Functions of the loss's own module are looked into; a function of another module is itself. A
    container, and an object's attributes, may hold another network or function each time.
    """
    found: list[Any] = []
    waiting, seen, own = [loss], set[int](), None
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Tensor):
            found.append((value.dim(), value.dtype))
        elif isinstance(value, MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, nn.Module):
            found.append(tuple((part, part.training) for part in value.modules()))
        elif isinstance(value, FunctionType) and value.__globals__ is (own or value.__globals__):
            if id(value) not in seen:
                seen.add(id(value))
                own = value.__globals__
                found.append(value.__code__)
                waiting += _read_by(value)
        else:
            found.append(value if _is_hashable(value) else type(value))
            if id(value) not in seen:
                seen.add(id(value))
                waiting += _held_by(value)
    return tuple(found)


def _held_by(value: Any) -> Iterator[Any]:
    """Yield the networks and functions that an object holds, and what may hold some in turn."""
    if isinstance(value, (type, ModuleType)):
        return
    if not isinstance(value, (dict, list, tuple)):
        value = getattr(value, "__dict__", {})
    parts = value.values() if isinstance(value, dict) else value
    for part in itertools.islice(parts, HELD):
        if isinstance(part, _MAY_DIFFER):
            yield part


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function reads beside its arguments."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in code.co_names:
            yield function.__globals__.get(name)
