"""``maml.meta_gradient``: differentiate a user's own problem, with tasks batched where possible."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.execution.outside import globals_of
from maml.library.alone import alone
from maml.metagradient import differentiate
from maml.metagradient.batching import DRAWN, batching_of
from maml.metagradient.by_task import Batching, Way, n_tasks_of
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.problem import Problem
from maml.params import Params

TRIED = 3
"""The number of tasks on which we compare batching with a loop, before a problem is batched."""
KNOWN = 32
"""Remember this many problems, the latest ones. Networks that they hold stay in memory."""
_KNOWN: OrderedDict[Any, Batching] = OrderedDict()
HELD = 10_000
"""Visit at most this many objects to distinguish a problem from others."""


@alone()
def meta_gradient(
    state: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    batching: Literal["auto", "vmap", "tasks"] = "auto",
) -> OuterGradient:
    """Differentiate the outer loss summed over B tasks by meta-parameters.

    Args:
        state: A function from meta-parameters to the problem. It may compute the problem's tensors
            from them by any differentiable function.
        meta_params: ``{name: […]}``; not changed.
        tasks: A `datasets.tasks.Task` of B tasks, or any nest of tensors ``[B, …]``.
        way: auto, reverse (through the whole inner loop) or mixed (back step by step, so that
            memory does not grow with the steps). The results differ only by rounding.
        batching: How to compute tasks without kernels: "vmap" (all at once) or "tasks" (one after
            the other, as a plain loop does). "auto" takes "vmap" if it gives the same as a loop. It
            compares them on a few tasks, in a problem's first call with two tasks or more.

    Raises:
        RuntimeError: for a meta-parameter that no tensor of the problem depends on, and for a
            parameter that no loss reads. We take both as mistakes, not as zero gradients.
        ValueError: for losses that count their calls or draw from their own generator, and for
            a `datasets.tasks.Task` that is not a batch.
    """
    if isinstance(tasks, Task) and tasks.support_y.dim() < 2:
        raise ValueError("tasks is a single task, not a batch of tasks: take episodes.tasks([0])")
    sizes = {len(t) if isinstance(t, Tensor) and t.dim() else -1 for t in pytree.tree_leaves(tasks)}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError("tasks must be a nest of tensors [B, …] alone, with the same B in all")
    if batching != "auto":
        return differentiate.meta_gradient(state, meta_params, tasks, way, batching)
    leaves, spec = pytree.tree_flatten(tasks)
    kinds = tuple((leaf.dim(), leaf.dtype, leaf.device) for leaf in leaves)
    key = (_identity(state), kinds, str(spec), way)
    found = _batching_of(key, state, meta_params, tasks, way)
    try:
        return differentiate.meta_gradient(state, meta_params, tasks, way, found)
    except RuntimeError as error:
        if found == "tasks" or DRAWN not in str(error):
            raise
        # The losses draw only now, for example because a dropout rate was zero before.
        del _KNOWN[key]
    return differentiate.meta_gradient(state, meta_params, tasks, way, "tasks")


def _batching_of(
    key: Any, state: Callable[[Params], Problem], meta_params: Params, tasks: Any, way: Way
) -> Batching:
    if key in _KNOWN:
        _KNOWN.move_to_end(key)
        return _KNOWN[key]
    if n_tasks_of(tasks) < 2:
        return "tasks"  # one task cannot show a difference
    some = pytree.tree_map(lambda tensor: tensor[:TRIED], tasks)
    _KNOWN[key] = batching_of(state, meta_params, some, way).batching
    if len(_KNOWN) > KNOWN:
        _KNOWN.popitem(last=False)
    return _KNOWN[key]


def _identity(state: Callable[[Params], Problem]) -> tuple[Any, ...]:
    """Return a problem's key: the code, networks, ints and strings that it reaches, no tensors."""
    found: list[Any] = []
    waiting: list[Any] = [state]
    seen = set[int]()
    while waiting and len(seen) < HELD:
        value = waiting.pop(0)
        if id(value) in seen or isinstance(value, (ModuleType, Tensor)):
            continue
        seen.add(id(value))
        if isinstance(value, (int, str)):
            found.append(value)
        elif isinstance(value, (type, FunctionType)):
            found.append(value)
            if (value.__module__ or "").split(".")[0] in ("torch", "builtins"):
                continue
            if isinstance(value, type):
                waiting += [*vars(value).values(), *value.__bases__]
            else:
                found[-1] = value.__code__
                waiting += [value.__defaults__, value.__kwdefaults__, value.__closure__]
                waiting += [value.__globals__.get(name) for name in globals_of(value.__code__)]
        else:
            if isinstance(value, nn.Module):
                found.append((value, value.training))
            waiting += gc.get_referents(value)
    return tuple(found)
