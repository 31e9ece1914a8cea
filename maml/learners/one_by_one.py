"""Compute B tasks one by one. Several threads share the tasks.

This serves where ``torch.func.vmap`` cannot batch tasks, or where one task is enough work for a
core (``--batching``). A network's random draws have the address of the task.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from datasets.generators import kept, state
from maml.execution.outside import COUNTING, outside_of
from maml.execution.threads import spread
from maml.execution.trial import Trial
from maml.learners.base import Learner
from maml.metagradient import draws
from maml.metagradient.batching import DRAWN
from maml.metagradient.by_task import one_by_one
from maml.metagradient.differentiate import OuterGradient
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
        if call is None or learner.draws:
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
    """Return ``[function(learner, tasks)]`` if the learner batches tasks, else the list of `each`.

    ``tasks`` may be a list of batches of one task, of any sizes, which are computed one by one.
    ``where`` is as in `each`. If a batch fails or draws, tasks are computed one by one from here
    on. If they draw, set `Learner.draws`, and compute them again by their addresses. If they write
    what threads share, set `Learner.shares`, and compute them again by one thread, unless it is
    one already.
    """
    if learner.batching == "vmap" and not isinstance(tasks, list):
        # Torch refuses its own draws in a batch, but not those of numpy and Python. A thread that
        # makes tasks seeds the generators, which would look like a draw, so it waits.
        watched = not _is_known(learner)
        try:
            with draws.alone() if watched else contextlib.nullcontext():
                before = state() if watched else 0
                together = function(learner, tasks)
                drawn = watched and state() != before
            if not drawn:
                return [together]
        except RuntimeError as error:
            # A later phase, or an answer, may draw or read a value. If it is another error, a task
            # alone raises it again.
            drawn = DRAWN in str(error)
        learner.draws, learner.batching = learner.draws or drawn, "tasks"
    batching, learner.batching = learner.batching, "tasks"
    try:
        with draws.alone(), kept():
            before = state()
            # What is known to write is not looked at again: a list that a hook fills would make
            # each call longer.
            outside = None if learner.shares else outside_of(learner, learner.criterion)
            found, failed = list[T](), None
            try:
                found += each(learner, function, tasks, where)
            except Exception as error:
                failed = error
            drawn = state() != before
        wrote = outside is not None and not outside.is_same()
        again = (drawn and not learner.draws) or (wrote and learner.shares is False)
        learner.draws, learner.shares = learner.draws or drawn, wrote or bool(learner.shares)
        if again:
            if outside is not None:
                outside.put_back()
            found = list(each(learner, function, tasks, where))
        elif failed is not None:
            raise failed
    finally:
        learner.batching = batching
    return found


def _is_known(learner: Learner) -> bool:
    """Return whether only this project's code computes the tasks: it draws from no generator."""
    return type(learner).__module__.startswith("maml.") and is_ours(learner.network)


@contextlib.contextmanager
def at_test(learner: Learner) -> Iterator[None]:
    """Within this context dropout is off, unless ``--eval-draws`` is set. After it, the learner
    batches and draws as before: what a test finds out says nothing about training.
    """
    before = learner.draws, learner.batching, learner.shares
    try:
        with switched(learner, training=learner.config.eval_draws):
            yield
    finally:
        learner.draws, learner.batching, learner.shares = before


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
    if where is None or not learner.draws:
        where = [draws.NONE] * len(items)
    placed = list(zip(items, where, strict=True))

    def one(own: Learner, item: tuple[Any, draws.Address]) -> T:
        # A policy acts before its losses, and may draw then, too.
        with draws.of_task(item[1]), draws.at("task", 0), COUNTING:
            return function(own, item[0])

    if not learner.draws:
        yield from spread(
            learner, one, placed, several=not learner.shares, in_turn=learner.shares is None,
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
