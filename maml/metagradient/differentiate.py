"""The one place that differentiates an inner problem, whichever way.

Every way gives the same number: reverse mode through the loop, back through it step by step with
derivatives by ``torch.func``, by plain autograd or by compiled kernels, and, for a problem that
asks for it, the implicit gradient at its solution. Compiled kernels are chosen by the losses that
the problem states: they serve the network's plain cross-entropy, and nothing else can meet them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from maml import kernels
from maml.errors import UserError
from maml.kernels.derivatives import Derivatives
from maml.metagradient import displacement, draws, forward_over_reverse, implicit, unrolled
from maml.metagradient.by_task import Batching, TaskDerivatives, one_by_one, unstacked
from maml.metagradient.function import FunctionDerivatives
from maml.metagradient.head_alone import HeadAlone, moves_head_alone
from maml.metagradient.problem import Outer, Problem, called
from maml.networks.feature_loss import FeatureLoss
from maml.networks.loss import NetworkLoss
from maml.networks.modulated_loss import ModulatedLoss
from maml.networks.norms import tensors
from maml.params import Params

T = TypeVar("T")
Compiled: TypeAlias = kernels.Native | HeadAlone
"""What of the compiled kernels serves a problem."""
Making: TypeAlias = Callable[[Problem], Derivatives]
"""Makes the derivatives of a problem's losses."""
Way: TypeAlias = Literal["auto", "reverse", "mixed"]
"""auto: mixed with kernels or on a GPU, else reverse; mixed: back step by step."""
Kernels: TypeAlias = Literal["auto", "torch"]
"""auto: compiled derivatives where they serve; torch: none."""


class OuterGradient(NamedTuple):
    """The outer loss of B tasks, differentiated by the meta-parameters.

    Attributes:
        gradients: Σ over tasks, ``{name: […]}``, of every meta-parameter.
        losses: ``[B]``.
        outputs: ``[B, …]``, the query loss's outputs after the last step.
        metrics: ``{name: [B]}``, what a learner measures of them.
    """

    gradients: Params
    losses: Tensor
    outputs: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})


def native(problem: Problem, way: Way = "auto", allowed: Kernels = "auto") -> Compiled | None:
    """Return what of compiled kernels serves ``problem``, or None."""
    if obstacle(problem, way, allowed) is not None:
        return None
    if moves_head_alone(problem):
        return HeadAlone(problem)
    return kernels.derivatives_of(_support(problem), problem.query, problem.start)


def adapt(
    problem: Problem, tasks: Any, compiled: Compiled | None, batching: Batching = "vmap"
) -> Params:
    """Return what of B tasks has adapted after the inner loop, ``{name: [B, …]}``.

    ``compiled``: what of compiled kernels serves, in whose coordinates it is then.
    """
    if isinstance(compiled, HeadAlone):
        return compiled.adapt(tasks)
    if compiled is not None:
        return forward_over_reverse.adapt(problem, tasks, compiled)
    if batching == "vmap":
        return torch.func.vmap(lambda task: unrolled.adapt(problem, task))(tasks)
    derivatives = TaskDerivatives(problem)
    found = _of_each(lambda task: forward_over_reverse.adapt(problem, task, derivatives), tasks)
    return {name: torch.cat([each[name] for each in found]) for name in problem.start}


def _of_each(compute: Callable[[Any], T], tasks: Any) -> list[T]:
    """Return what is computed of each task, a batch of one; losses draw by the task's address."""
    with draws.of_call() as address:
        found = []
        for place, task in enumerate(one_by_one(tasks)):
            with draws.of_task(address(place)):
                found.append(compute(task))
    return found


def obstacle(problem: Problem, way: Way = "auto", allowed: Kernels = "auto") -> str | None:
    """Say why compiled kernels do not serve ``problem``; None: they do."""
    if allowed == "torch":
        return "--kernels torch was asked for"
    if way == "reverse" and problem.implicit is None:
        return "the compiled kernels serve --meta-gradient mixed, not reverse"
    return kernels.obstacle(_support(problem), problem.query, problem.params(problem.start, 0))


def _support(problem: Problem) -> Any:
    """Return the support loss, or None where nothing descends it."""
    return problem.support if problem.steps or problem.implicit is not None else None


def _goes_forward(problem: Problem, way: Way) -> bool:
    """Whether ``way`` goes back step by step where no compiled derivatives serve.

    On a GPU it is: MixFlow-MG (arXiv:2505.00793) measures it ahead of reverse mode there, in time
    and in memory. Here it was not measured.
    """
    if way == "auto":
        return any(tensor.device.type != "cpu" for tensor in problem.start.values())
    return way == "mixed"


def _check_read(problem: Problem, tasks: Any) -> None:
    """Refuse losses that read other parameters than they should.

    Raises:
        ValueError: for one that reads parameters which are not handed to it. What a function closes
            over is a constant to every way of differentiating.
        RuntimeError: for a parameter that no loss reads: a mistake, not a zero.
    """
    unread = {*problem.start, *problem.fixed}
    places = [("query", problem.last_step), *(("support", step) for step in range(problem.steps))]
    for part, step in places:
        # A loss may know its step. One step of the support loss tells all, or else they are asked.
        if step == 0 or unread:
            unread -= _names_read(problem, part, step, tasks)
    if unread:
        name = min(unread)
        what = "adapt"
        if name not in problem.start:
            what = "be learned; if it is frozen, call its layers without torch.no_grad()"
        raise RuntimeError(
            f"{name!r} appears to not have been used by any loss, but it is to {what}"
        )


_OF_NETWORKS = (NetworkLoss, FeatureLoss, ModulatedLoss)
"""Losses that say which network they are of, and of what kind."""

MOST_KNOWN = 64
"""Entries of one network: functions that are made anew each time must not pile up."""

_READ: weakref.WeakKeyDictionary[nn.Module, dict[Any, frozenset[str]]] = weakref.WeakKeyDictionary()
"""What the losses of the networks that were looked at read, by part and size of the set."""


def _names_read(problem: Problem, part: str, step: int, tasks: Any) -> frozenset[str]:
    """Return the names of the parameters that a loss reads, in the first of some tasks.

    Raises:
        ValueError: if it reads others, or is no scalar.
    """
    loss = getattr(problem, part)
    if isinstance(loss, _OF_NETWORKS):
        # A network may read other parameters of a larger set, and its loss is anybody's.
        known = _READ.setdefault(loss.network, {})
        key = loss.kind, tuple(x.shape[1:] for x in (tasks.support_x, tasks.query_x))
        if key not in known and _reads_all(loss):
            known[key] = frozenset(tensors(loss.network))
        if key in known:
            return known[key]
        if len(known) > MOST_KNOWN:
            known.clear()
    params = {
        name: tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in problem.params(problem.start, step).items()
    }
    first = next(unstacked(tasks))
    try:
        with draws.at(part, step):
            value, _ = called(loss, params, first, step)
    except RuntimeError as error:
        _explain_dtypes(params, first, error)
        raise
    leaves = _leaves_under(value)
    found = frozenset(name for name, tensor in params.items() if id(tensor) in leaves)
    if len(leaves) > len(found):
        raise ValueError(
            f"the {part} loss reads parameters that are not among its params, and would not be "
            "differentiated by them: put them into the problem's fixed, and read them from "
            "params. A module does not know of layers in a Python list: keep them in nn.ModuleList"
        )
    if value.dim():
        raise ValueError(f"the {part} loss is {list(value.shape)}, not a scalar")
    if isinstance(loss, _OF_NETWORKS):
        known[key] = found
    return found


def _explain_dtypes(params: Params, task: Any, error: RuntimeError) -> None:
    """Raise `UserError` where a loss may have failed as tasks and parameters are of two dtypes."""
    of_task, of_params = (
        " and ".join(
            sorted({str(t.dtype) for t in pytree.tree_leaves(of) if t.is_floating_point()})
        )
        for of in (task, params)
    )
    if of_task and of_params and of_task != of_params:
        raise UserError(
            f"tasks: they are {of_task}, and the parameters {of_params}; give both as one dtype "
            f"({' '.join(str(error).split())})"
        ) from None


def _reads_all(loss: NetworkLoss | FeatureLoss | ModulatedLoss) -> bool:
    """Say whether a loss is known to read all parameters of its network, without a look."""
    if not isinstance(loss, NetworkLoss) or loss.theirs:
        return False
    return loss.loss.__module__.startswith("maml.")


def _leaves_under(value: Tensor) -> set[int]:
    """Return the ids of the tensors that a value's graph begins with."""
    if value.grad_fn is None:
        return {id(value)} if value.requires_grad else set()
    leaves, seen, waiting = set(), {value.grad_fn}, [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return leaves


def differentiate(
    problem: Problem,
    tasks: Any,
    way: Way = "auto",
    allowed: Kernels = "auto",
    derivatives_of: Making | None = None,
    batching: Batching = "vmap",
) -> Outer:
    """Differentiate the outer loss of B tasks by the problem's tensors.

    Args:
        problem: The problem.
        tasks: A `datasets.tasks.Task` of B tasks, or any nest of tensors with that leading
            dimension.
        way: How; no result depends on it beyond rounding.
        allowed: Which kernels may serve.
        derivatives_of: Makes the derivatives of the losses, in place of those that ``way`` and
            ``allowed`` choose; step by step, where the problem is not implicit.
        batching: How tasks are computed where no kernels serve. By "tasks" all ways go back step by
            step.
    """
    choices_of = {way: get_args(Way), allowed: get_args(Kernels), batching: get_args(Batching)}
    for value, choices in choices_of.items():
        if value not in choices:
            raise ValueError(f"{value!r}: one of {', '.join(choices)}")
    if problem.second_moment is not None and not (problem.displacement and problem.steps):
        raise ValueError(
            "second_moment: only a displacement, of a step or more, says where it moves"
        )
    derivatives: Derivatives | HeadAlone | None
    if derivatives_of is None:
        derivatives = native(problem, way, allowed)
    else:
        derivatives = derivatives_of(problem)
    if isinstance(derivatives, HeadAlone):
        return derivatives.differentiate(tasks)
    if derivatives is not None:
        return _step_by_step(problem, tasks, derivatives)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        if batching == "tasks":
            return _task_by_task(problem, tasks)
        unrolls = problem.implicit is None and not problem.displacement
        if unrolls and not _goes_forward(problem, way):
            return unrolled.through_loop(problem, tasks)
        return _step_by_step(problem, tasks, FunctionDerivatives(problem))


def _step_by_step(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Differentiate by the derivatives of the losses alone: memory does not grow with the steps."""
    if problem.implicit is not None:
        return implicit.at_solution(problem, tasks, derivatives)
    if problem.displacement:
        return displacement.displaced(problem, tasks, derivatives)
    return forward_over_reverse.step_by_step(problem, tasks, derivatives)


def _task_by_task(problem: Problem, tasks: Any) -> Outer:
    """Differentiate one task after the other, and add up in their order."""
    derivatives = TaskDerivatives(problem)
    found = _of_each(lambda task: _step_by_step(problem, task, derivatives), tasks)
    leaves = zip(*(each.gradients.leaves() for each in found), strict=True)
    gradients = found[0].gradients.with_leaves(torch.stack(each).sum(0) for each in leaves)
    losses, outputs = (torch.cat(part) for part in zip(*(each[1:] for each in found), strict=True))
    return Outer(gradients, losses, outputs)


@torch.enable_grad()
def meta_gradient(
    state: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    allowed: Kernels = "auto",
    derivatives_of: Making | None = None,
    batching: Batching = "vmap",
    *,
    checked: bool = False,
) -> OuterGradient:
    """Differentiate the outer loss summed over B tasks by meta-parameters.

    Args:
        state: What states the problem, given meta-parameters; it may compute the problem's tensors
            from them by any differentiable function.
        meta_params: ``{name: […]}``; not changed.
        tasks: As in `differentiate`.
        way: As in `differentiate`.
        allowed: As in `differentiate`.
        derivatives_of: As in `differentiate`.
        batching: As in `differentiate`.
        checked: Whether the losses are known to read the parameters that they should.

    Raises:
        RuntimeError: for a meta-parameter that no tensor of the problem depends on, and for a
            parameter that no loss reads: mistakes, not zeros.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in meta_params.items()}
    problem = state(leaves)
    if not checked:
        _check_read(problem, tasks)
    outer = differentiate(problem, tasks, way, allowed, derivatives_of, batching)
    gradients = problem.tensors().pull_back(outer.gradients, leaves)
    return OuterGradient(gradients, outer.losses, outer.outputs)
