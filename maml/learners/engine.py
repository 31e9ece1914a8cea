"""Compute B tasks of a learner as its plan says: all at once, or one by one.

One by one serves where ``torch.func.vmap`` cannot batch tasks, or where one task is enough work for
a core (``--batching``). Several threads share the tasks. A network's random draws have the address
of the task. What a call finds out changes the plan.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from datasets.generators import kept, state
from maml.execution.outside import COUNTING, outside_of
from maml.execution.threads import spread
from maml.execution.trial import Trial
from maml.learners.base import Learner
from maml.metagradient import draws
from maml.metagradient.by_task import one_by_one
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.plan import Plan, decide, without_draws
from maml.networks.calls import alone_with
from maml.networks.loss import is_ours
from maml.networks.ordinary import switched
from maml.params import Params

T = TypeVar("T")


def addresses(learner: Learner, split: str, ids: Tensor) -> list[draws.Address]:
    """Return the address of the random draws of each task in ``ids [B]``."""
    return [draws.Address(learner.config.seed, split, id) for id in ids.tolist()]


def outer_gradient(
    learner: Learner,
    meta_params: Params,
    tasks: Any,
    where: Sequence[draws.Address],
    phase: int,
    call: Callable[..., OuterGradient] | None = None,
) -> OuterGradient:
    """Return the same as `Learner.outer_gradient`, without ``outputs``, as `found_in` computes it.

    ``call`` takes a function, the meta-parameters and tasks, and calls the function, for example
    compiled (``--compile``).
    """

    def gradient(own: Learner, some: Any) -> OuterGradient:
        function = functools.partial(own.outer_gradient, phase=phase, checked=some is not tasks)
        if call is None or learner.plan.draws:
            return function(meta_params, some)
        return call(function, meta_params, some)

    learner.checked_way(meta_params, tasks, phase)
    found = found_in(learner, gradient, tasks, where)
    sums = found[0].gradients
    for of_task in found[1:]:
        sums = {name: total + of_task.gradients[name] for name, total in sums.items()}
    return OuterGradient(
        sums,
        torch.cat([of.losses for of in found]),
        None,
        {name: torch.cat([of.metrics[name] for of in found]) for name in learner.metric_names},
    )


def found_in(
    learner: Learner,
    function: Callable[[Learner, Any], T],
    tasks: Any,
    where: Sequence[draws.Address],
) -> list[T]:
    """Return ``[function(learner, tasks)]`` if the plan is a batch, else the list of `each`.

    ``tasks`` may be a list of batches of one task, of any sizes, which are computed one by one.
    ``where`` is as in `each`. If a batch fails or draws, tasks are computed one by one from here
    on. If they draw, the plan says so, and they are computed again by their addresses. If they
    write what threads share, the plan says so, and one thread computes them again, unless it was
    one already.
    """
    plan = learner.plan
    if plan.batching == "vmap" and not isinstance(tasks, list):
        together = without_draws(
            plan, lambda: function(learner, tasks), watched=not _is_known(learner)
        )
        if together is not None:
            return [together]
    try:
        with draws.alone(), kept():
            before = state()
            # What is known to write is not looked at again: a list that a hook fills would make
            # each call longer.
            outside = None if plan.shares else outside_of(learner, learner.criterion)
            learner.plan = replace(plan, batching="tasks")
            found, failed = list[T](), None
            try:
                found += each(learner, function, tasks, where)
            except Exception as error:
                failed = error
            drawn = state() != before
        wrote = outside is not None and not outside.is_same()
        again = (drawn and not plan.draws) or (wrote and plan.shares is False)
        plan.draws, plan.shares = plan.draws or drawn, wrote or bool(plan.shares)
        if again:
            if outside is not None:
                outside.put_back()
            learner.plan = replace(plan, batching="tasks")
            found = list(each(learner, function, tasks, where))
        elif failed is not None:
            raise failed
    finally:
        learner.plan = plan
    return found


def _is_known(learner: Learner) -> bool:
    """Return whether only this project's code computes the tasks: it draws from no generator."""
    return type(learner).__module__.startswith("maml.") and is_ours(learner.network)


@contextlib.contextmanager
def at_test(learner: Learner) -> Iterator[None]:
    """Within this context dropout is off, unless ``--eval-draws`` is set. After it, the learner
    batches and draws as before: what a test finds out says nothing about training.
    """
    plan = learner.plan
    learner.plan = replace(plan)
    try:
        with switched(learner, training=learner.config.eval_draws):
            yield
    finally:
        learner.plan = plan


def each(
    learner: Learner,
    function: Callable[[Learner, Any], T],
    tasks: Any,
    where: Sequence[draws.Address] | None = None,
) -> Iterator[T]:
    """Yield ``function(learner or a copy, task)`` for each task (a batch of one), in order.

    ``where`` has the address of each task's random draws, if the tasks draw.
    """
    items = list(one_by_one(tasks))
    plan = learner.plan
    if where is None or not plan.draws:
        where = [draws.NONE] * len(items)
    placed = list(zip(items, where, strict=True))

    def one(own: Learner, item: tuple[Any, draws.Address]) -> T:
        # A policy acts before its losses, and may draw then, too.
        with draws.of_task(item[1]), draws.at("task", 0), COUNTING:
            return function(own, item[0])

    if not plan.draws:
        yield from spread(
            learner, one, placed, several=not plan.shares, in_turn=plan.shares is None,
            copying=alone_with(learner.network),
        )  # fmt: skip
        return
    # A checkpointed block draws once more in the backward pass, so the lock covers both passes.
    with draws.alone(), kept():
        yield from spread(learner, one, placed, alone=True)


def is_heavy(learner: Learner, meta_params: Params, tasks: Any) -> bool:
    """Return whether an operation on one task is enough work for a core."""
    with draws.alone(), kept(), draws.of_task(draws.NONE), Trial(weigh=True) as trial:
        for task in one_by_one(tasks):
            learner.outer_gradient(meta_params, task, learner.last_phase, checked=True)
    return trial.is_heavy


def plan_of(learner: Learner, meta_params: Params, tasks: Any, phase: int, *, weigh: bool) -> Plan:
    """Return how to compute tasks like these, by computing them in both ways: see `plan.decide`."""
    return decide(
        lambda at: learner.training_problem(at, phase), meta_params, tasks,
        learner.config.meta_gradient, code=learner.criterion, owner=learner, checked=True,
        weigh=weigh,
    )  # fmt: skip
