"""``maml.meta_gradient``: differentiate a user's own problem, with tasks batched where possible."""

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.generators import kept
from datasets.tasks import Task
from maml.execution.compiled import SHAPES, Compiled, inductor, settings
from maml.execution.outside import Reached
from maml.library.alone import alone
from maml.metagradient import differentiate, draws
from maml.metagradient.by_task import Way, n_tasks_of
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.plan import Plan, Plans, decide, without_draws
from maml.metagradient.problem import Problem
from maml.params import Params

TRIED = 3
"""The number of tasks on which we compare batching with a loop, before a problem is batched."""
_PLANS = Plans(32)


@alone()
def meta_gradient(
    state: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    batching: Literal["auto", "vmap", "tasks"] = "auto",
    compile: Literal["auto", True, False] = False,
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
        compile: Whether to compile the meta-gradient of tasks that are batched: see `maml.MAML`. A
            call uses code only if its problem reaches the same objects, numbers and functions as
            the one that was compiled. So what changes in each call belongs in ``tasks``.

    Raises:
        RuntimeError: for a meta-parameter that no tensor of the problem depends on, and for a
            parameter that no loss reads. We take both as mistakes, not as zero gradients.
        ValueError: for losses that count their calls or draw from their own generator, and for
            a `datasets.tasks.Task` that is not a batch.
    """
    _check(tasks, batching, compile)
    if compile is False and batching != "auto":
        return differentiate.meta_gradient(state, meta_params, tasks, way, batching)
    reached = Reached(state)
    plan = _plan(reached, state, meta_params, tasks, way)

    def plainly(params: Params, some: Any) -> OuterGradient:
        return _as_planned(plan, state, params, some, way)

    def together(params: Params, some: Any) -> OuterGradient:
        return differentiate.meta_gradient(state, params, some, way, "vmap", checked=True)

    code = compile and _code(plan, reached, state, waits=compile is True)
    if not code:
        return plainly(meta_params, tasks)
    return OuterGradient(*code(_parts_of(plainly), meta_params, tasks, records=_parts_of(together)))


def _check(tasks: Any, batching: str, compile: Any) -> None:
    if not all(
        len(leaf) for leaf in pytree.tree_leaves(tasks) if isinstance(leaf, Tensor) and leaf.dim()
    ):
        raise ValueError("tasks is empty: give one task or more")
    if isinstance(tasks, Task) and tasks.support_y.dim() < 2:
        raise ValueError("tasks is a single task, not a batch of tasks: take episodes.tasks([0])")
    sizes = {len(t) if isinstance(t, Tensor) and t.dim() else -1 for t in pytree.tree_leaves(tasks)}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError("tasks must be a nest of tensors [B, …] alone, with the same B in all")
    if compile not in ("auto", True, False):
        raise ValueError(f"compile {compile!r}: auto, True or False")
    if batching not in ("auto", "vmap", "tasks"):
        raise ValueError(f"batching {batching!r}: auto, vmap or tasks")
    if compile is not False and batching == "tasks":
        raise ValueError("compile computes all tasks at once: leave out batching")


def _plan(
    reached: Reached, state: Callable[[Params], Problem], meta_params: Params, tasks: Any, way: Way
) -> Plan:
    """Return the plan of a problem; the first call with two tasks or more decides."""
    leaves, spec = pytree.tree_flatten(tasks)
    kinds = tuple((leaf.dim(), leaf.dtype, leaf.device) for leaf in leaves)
    code, constants = _identity(reached)
    # Code that writes outside may count there. Its tasks are computed one by one anyway.
    any_count: Any = (code, kinds, str(spec), way)
    key = any_count if any_count in _PLANS.known else (any_count, constants)
    tells = n_tasks_of(tasks) > 1  # one task cannot show a difference

    def decided() -> Plan:
        if not tells:
            return Plan("tasks")
        some = pytree.tree_map(lambda tensor: tensor[:TRIED], tasks)
        return decide(state, meta_params, some, way, code=state, weigh=True)

    plan = _PLANS.of(key, decided, tells=tells)
    if plan.shares and key != any_count:
        _PLANS.known[any_count] = _PLANS.known.pop(key)
    return plan


def _as_planned(
    plan: Plan, state: Callable[[Params], Problem], meta_params: Params, tasks: Any, way: Way
) -> OuterGradient:
    if not plan.draws:
        with kept(), draws.of_task(draws.NONE):
            found = without_draws(
                plan,
                lambda: differentiate.meta_gradient(state, meta_params, tasks, way, plan.batching),
            )
        if found is not None:
            return found
    return differentiate.meta_gradient(state, meta_params, tasks, way, "tasks")


def _parts_of(function: Callable[..., OuterGradient]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that returns the tensors of a meta-gradient."""

    def parts(params: Params, tasks: Any) -> tuple[Any, ...]:
        found = function(params, tasks)
        if found.end is not None:
            raise RuntimeError("a problem that goes on later is not compiled")
        return found.gradients, found.losses, found.outputs

    return parts


def _code(plan: Plan, reached: Reached, state: Any, *, waits: bool) -> Compiled | None:
    """Return what compiles a problem that reaches the same as ``state``; None: nothing does.

    If that was asked for, one line says why.
    """
    key = (*settings(), reached.form(_name))
    other = None
    if key not in plan.code and len(plan.code) >= SHAPES:
        other = (
            f"the problem has reached other numbers or objects in more than {SHAPES} calls; give "
            "what changes in tasks"
        )
    if not plan.compiles(says=waits, other=other):
        return None
    if key not in plan.code:
        parameters = [value for value in reached.values if isinstance(value, nn.Parameter)]
        apart = [parameter for parameter in parameters if parameter.requires_grad]
        plan.code[key] = Compiled(inductor, reads=[state], apart=apart, waits=waits, name="compile")
    return plan.code[key]


def _name(value: Any) -> Any:
    """Return what is the same in two calls for a value that is the same, though made anew."""
    if isinstance(value, FunctionType):
        return value.__code__
    if isinstance(value, bool | int | float | complex | str | bytes | NoneType):
        return type(value), repr(value)  # as 0.0 equals -0.0
    if isinstance(value, Tensor):
        return id(value), value.requires_grad
    if isinstance(value, CellType | MethodType | functools.partial | tuple | list | dict):
        return type(value)  # `Reached.form` has what it holds
    return id(value)


def _identity(reached: Reached) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return a problem's key: code and networks that it reaches; and ints and strings."""
    code, constants = list[Any](), list[Any]()
    for value in reached.values:
        if isinstance(value, FunctionType):
            code.append(value.__code__)
        elif isinstance(value, nn.Module):
            code.append((value, value.training))
        elif isinstance(value, type):
            code.append(value)
        elif isinstance(value, (int, str)):
            constants.append(value)
    return tuple(code), tuple(constants)
