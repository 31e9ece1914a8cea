"""The one place that differentiates an inner problem, in any way.

The ways are reverse mode through the loop, or back through it step by step. Both give the same
number, with all tasks at once or one after the other. A problem may also request the implicit
gradient at its solution. Compiled kernels are a part of the network (`maml.networks.stack`). Only
for plain cross-entropy, they also compute head and loss (`maml.metagradient.native`).
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.generators import kept
from maml.metagradient import at_end, draws, forward_over_reverse, unrolled
from maml.metagradient.by_task import Batching, Way, each_task, n_tasks_of, one_by_one
from maml.metagradient.forward_over_reverse import REMEMBERED_STEPS
from maml.metagradient.function import Derivatives
from maml.metagradient.native import native
from maml.metagradient.problem import End, Outer, Problem
from maml.metagradient.reading import checked_way
from maml.params import Params

T = TypeVar("T")


class OuterGradient(NamedTuple):
    """The outer loss of B tasks, differentiated by the meta-parameters.

    Attributes:
        gradients: Σ over tasks, ``{name: […]}``, of every meta-parameter.
        losses: ``[B]``.
        outputs: ``[B, …]``, or a nest of tensors: the query loss's outputs after the last step.
            () if the tasks' outputs differ in size.
        metrics: ``{name: [B]}``, a learner's metrics of the outputs.
        end: The end of the single task's loop, if `Problem.lives_on`.
    """

    gradients: Params
    losses: Tensor
    outputs: Any
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    end: End | None = None


def adapt(problem: Problem, tasks: Any, batching: Batching = "vmap") -> Params:
    """Return the adapted parameters of B tasks after the inner loop, ``{name: [B, …]}``."""
    derivatives = native(problem, tasks)
    if derivatives is not None:
        at, _ = forward_over_reverse.adapt(problem, tasks, derivatives)
        return {name: at[name] for name in problem.start}
    if batching == "vmap":
        return each_task(lambda task: unrolled.adapt(problem, task), batching)(tasks)
    alone = Derivatives(problem, alone=True)
    found = _of_each(lambda task: forward_over_reverse.adapt(problem, task, alone)[0], tasks)
    return {name: torch.cat([each[name] for each in found]) for name in problem.start}


def _of_each(compute: Callable[[Any], T], tasks: Any) -> list[T]:
    """Return ``compute(task)`` of each task, a batch of one; losses draw by the task's address.

    If the caller set no address, torch's global generator gives the addresses a seed. So two calls
    draw different numbers, and ``torch.manual_seed`` repeats them.
    """
    if draws.HERE.address is not None:
        return [compute(task) for task in one_by_one(tasks)]
    seed, found = int(torch.randint(2**62, (), device="cpu")), []
    with kept():
        for place, task in enumerate(one_by_one(tasks)):
            with draws.of_task(draws.Address(seed, "", place)):
                found.append(compute(task))
    return found


def differentiate(
    problem: Problem,
    tasks: Any,
    way: Way = "auto",
    batching: Batching = "vmap",
) -> Outer:
    """Differentiate the outer loss of B tasks by the problem's tensors.

    Args:
        problem: The problem.
        tasks: A `datasets.tasks.Task` of B tasks, or any nest of tensors with that leading
            dimension.
        way: How to differentiate; results differ only by rounding.
        batching: How to compute tasks that `native` does not cover.
    """
    choices_of = {way: get_args(Way), batching: get_args(Batching)}
    for value, choices in choices_of.items():
        if value not in choices:
            raise ValueError(f"{value!r}: one of {', '.join(choices)}")
    if problem.second_moment is not None and not (problem.displacement and problem.steps):
        raise ValueError("second_moment: needs displacement=True and at least one step")
    if problem.is_part and n_tasks_of(tasks) != 1:
        raise ValueError("lives_on, optimizer_state: give one task, with a leading dimension of 1")
    alone = batching == "tasks"
    if way == "auto" and any(tensor.device.type != "cpu" for tensor in problem.start.values()):
        # Not measured here: in MixFlow-MG (arXiv:2505.00793), mixed beats reverse mode on a GPU.
        way = "mixed"
    if not problem.is_part and (way != "reverse" or problem.implicit is not None):
        derivatives = native(problem, tasks, heads=way == "mixed")
        if derivatives is not None:
            return _step_by_step(problem, tasks, derivatives)
    if way == "auto" and alone and problem.steps > REMEMBERED_STEPS:
        way = "mixed"  # less memory, and alone no more time
    compute = functools.partial(unrolled.through_loop, problem, batching=batching)
    other = problem.implicit or problem.displacement or problem.is_part
    if other or problem.snapshots is not None or (way == "mixed" and problem.steps):
        any_loss = Derivatives(problem, alone=alone)
        compute = functools.partial(_step_by_step, problem, derivatives=any_loss)
    return _task_by_task(compute, tasks) if alone else compute(tasks)


def _step_by_step(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Differentiate by the losses' derivatives, without a graph through the whole inner loop."""
    if problem.implicit is not None:
        return at_end.at_solution(problem, tasks, derivatives)
    if problem.displacement:
        return at_end.displaced(problem, tasks, derivatives)
    return forward_over_reverse.step_by_step(problem, tasks, derivatives)


def _task_by_task(compute: Callable[[Any], Outer], tasks: Any) -> Outer:
    """Differentiate one task after the other, and sum the gradients in the order of the tasks."""
    found = _of_each(compute, tasks)
    if len(found) == 1:
        return found[0]
    of_each = [each.gradients for each in found]
    gradients = pytree.tree_map(lambda *each: torch.stack(each).sum(0), *of_each)
    losses = torch.cat([each.losses for each in found])
    sizes = {tuple(t.shape for t in pytree.tree_leaves(each.outputs)) for each in found}
    outputs: Any = ()
    if len(sizes) == 1:
        outputs = pytree.tree_map(lambda *each: torch.cat(each), *(each.outputs for each in found))
    return Outer(gradients, losses, outputs, found[0].end)


@torch.enable_grad()
def meta_gradient(
    state: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    batching: Batching = "vmap",
    *,
    checked: bool = False,
) -> OuterGradient:
    """Differentiate the outer loss of B tasks by meta-parameters: see `maml.meta_gradient`.

    ``checked``: `checked_way` has already checked which parameters the losses read.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in meta_params.items()}
    with draws.at("problem", 0):
        problem = state(leaves)
    if not checked:
        way = checked_way(problem, tasks, way)
    outer = differentiate(problem, tasks, way, batching)
    gradients = problem.tensors().pull_back(outer.gradients, leaves)
    return OuterGradient(gradients, outer.losses, outer.outputs, end=outer.end)
