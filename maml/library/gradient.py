"""``maml.meta_gradient``: differentiate a user's own problem, with tasks batched where possible."""

from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.generators import kept
from datasets.generators import state as generators
from datasets.tasks import Task
from maml.execution.outside import Reached
from maml.library.alone import alone
from maml.metagradient import differentiate, draws
from maml.metagradient.batching import DRAWN, Found, batching_of
from maml.metagradient.by_task import Batching, Way, n_tasks_of
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.problem import Problem
from maml.networks.ordinary import SECOND_ORDER
from maml.params import Params

TRIED = 3
"""The number of tasks on which we compare batching with a loop, before a problem is batched."""
KNOWN = 32
"""Remember this many problems, the latest ones. Networks that they hold stay in memory."""
_KNOWN: OrderedDict[Any, Found] = OrderedDict()


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
            the other, as a plain loop does). "auto" takes "vmap" if it gives the same as a loop,
            the losses keep nothing outside, and one task is not enough work for a core. It tries
            both on a few tasks, in a problem's first call with two tasks or more, and leaves
            nothing behind. If the losses reach what cannot be copied, as a lock or an open file, it
            tries nothing, and takes "tasks".

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
    with SECOND_ORDER:
        if batching != "auto":
            return differentiate.meta_gradient(state, meta_params, tasks, way, batching)
        leaves, spec = pytree.tree_flatten(tasks)
        kinds = tuple((leaf.dim(), leaf.dtype, leaf.device) for leaf in leaves)
        code, constants = _identity(state)
        # Code that writes outside may count there. Its tasks are computed one by one anyway.
        any_count: Any = (code, kinds, str(spec), way)
        key = any_count if any_count in _KNOWN else (any_count, constants)
        found = _found(key, state, meta_params, tasks, way)
        if found.shares and key != any_count:
            _KNOWN[any_count], key = _KNOWN.pop(key), any_count
        if not found.draws:
            of_all = _without_draws(state, meta_params, tasks, way, found.batching)
            if of_all is not None:
                return of_all
            # The losses draw only now, for example because a dropout rate was zero before.
            _KNOWN[key] = Found("tasks", draws=True)
        return differentiate.meta_gradient(state, meta_params, tasks, way, "tasks")


def _without_draws(
    state: Callable[[Params], Problem], meta_params: Params, tasks: Any, way: Way, how: Batching
) -> OuterGradient | None:
    """Return the meta-gradient; None if a loss draws: then it must draw by a task's address."""
    with kept(), draws.of_task(draws.NONE):
        before = generators()
        try:
            found = differentiate.meta_gradient(state, meta_params, tasks, way, how)
        except RuntimeError as error:
            if how == "tasks" or DRAWN not in str(error):
                raise
            return None
        return found if generators() == before else None


def _found(
    key: Any, state: Callable[[Params], Problem], meta_params: Params, tasks: Any, way: Way
) -> Found:
    known = _KNOWN.get(key)
    if known is None or known.fills:
        if n_tasks_of(tasks) < 2:
            return Found("tasks")  # one task cannot show a difference
        some = pytree.tree_map(lambda tensor: tensor[:TRIED], tasks)
        found = batching_of(state, meta_params, some, way, code=state, weigh=True)
        _KNOWN[key] = found._replace(fills=found.fills and known is None)
    _KNOWN.move_to_end(key)
    if len(_KNOWN) > KNOWN:
        _KNOWN.popitem(last=False)
    return _KNOWN[key]


def _identity(state: Callable[[Params], Problem]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return a problem's key: code and networks that it reaches; and ints and strings."""
    code, constants = list[Any](), list[Any]()
    for value in Reached(state).values:
        if isinstance(value, FunctionType):
            code.append(value.__code__)
        elif isinstance(value, nn.Module):
            code.append((value, value.training))
        elif isinstance(value, type):
            code.append(value)
        elif isinstance(value, (int, str)):
            constants.append(value)
    return tuple(code), tuple(constants)
