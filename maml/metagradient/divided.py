"""Derivatives of losses whose examples are divided over processes: sums over all of them.

The loss of a set is the mean over its examples, so with a part of the set on each of n processes

    L(φ) = Σ_r (E_r / E) L_r(φ),        E_r examples of E on process r,

and its gradient and Hessian-vector products are the same sums. Every process walks the whole inner
loop in step with the others, over parts of its own; what is summed is the same everywhere, and so
is all that is computed from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.kernels.derivatives import Derivatives, Gradient, Part
from maml.metagradient.problem import Problem
from maml.networks.loss import MiniBatches, NetworkLoss, apply, part_of
from maml.networks.mixing import mixes, same
from maml.params import Params

Sum: TypeAlias = Callable[[Tensor], Tensor]
"""Add up a flat tensor over all processes, which call it in step; the same bits everywhere."""


class DividedDerivatives(Derivatives):
    """See `maml.kernels.derivatives.Derivatives`: those of others, of a part of each task's sets.

    Tasks are given whole; outputs are those of whole sets.
    """

    def __init__(
        self,
        problem: Problem,
        make: Callable[[Problem], Derivatives],
        rank: int,
        size: int,
        sum_over_all: Sum,
    ) -> None:
        """Sum the derivatives of part ``rank`` of ``size`` over all parts.

        Args:
            problem: One without an `obstacle`.
            make: Makes the derivatives of a part, which is a set of its own.
            rank: Which part.
            size: How many.
            sum_over_all: Adds up over all processes.
        """
        self._rank, self._size, self._sum = rank, size, sum_over_all
        # Which examples a step sees is said of the whole set: they are taken out before it is
        # divided.
        self._batches: dict[str, MiniBatches | None] = {}
        losses: dict[str, Any] = {}
        for part in ("support", "query"):
            loss = getattr(problem, part)
            assert isinstance(loss, NetworkLoss)
            self._batches[part] = loss.batches
            losses[part] = dataclasses.replace(loss, batches=None)
        self._own = make(dataclasses.replace(problem, **losses))
        self.whole, self.absent = self._own.whole, self._own.absent

    def enter(self, params: Params) -> Params:
        """See `Derivatives.enter`."""
        return self._own.enter(params)

    def leave(self, gradients: Params) -> Params:
        """See `Derivatives.leave`."""
        return self._own.leave(gradients)

    def put(self, at: Params, params: Params) -> Params:
        """See `Derivatives.put`."""
        return self._own.put(at, params)

    def gradient(self, part: Part, at: Params, tasks: Task, step: int, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`."""
        tasks = self._seen(part, tasks, step)
        n_examples = part_of(tasks, part)[0].shape[1]
        begin, end = self._bounds(n_examples)
        weight = (end - begin) / n_examples
        # With more parts than examples, an empty part has any example, at a weight of zero.
        begin = min(begin, n_examples - 1)
        end = max(end, begin + 1)
        mine = Task(
            *(x[:, begin:end] if own == part else x for own, x in zip(_PARTS, tasks, strict=True))
        )
        found = self._own.gradient(part, at, mine, step, again=again)
        outputs = found.outputs.new_zeros(len(found.losses), n_examples, *found.outputs.shape[2:])
        if weight:
            outputs[:, begin:end] = found.outputs
        losses, outputs, *gradients = self._summed(
            [weight * found.losses, outputs, *(weight * g for g in found.gradients.values())]
        )
        named = dict(zip(found.gradients, gradients, strict=True))
        return Gradient(losses, outputs, named, (weight, found.point))

    def hessian_vector(
        self, point: Any, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        weight, own = point
        found = self._own.hessian_vector(own, vector, total=total, again=again)
        products = self._summed([weight * product for product in found.values()])
        return dict(zip(found, products, strict=True))

    def _seen(self, part: Part, tasks: Task, step: int) -> Task:
        """Return the tasks with what a step's loss sees of their sets."""
        batches = self._batches[part]
        if batches is None:
            return tasks
        x, y = part_of(tasks, part)
        places = batches.places(step, y.shape[1], y.device)
        return tasks._replace(**{f"{part}_x": x[:, places], f"{part}_y": y[:, places]})

    def _bounds(self, n: int) -> tuple[int, int]:
        """Return where this part of n examples begins and ends, as even as n allows."""
        size, left_over = divmod(n, self._size)
        begin = self._rank * size + min(self._rank, left_over)
        return begin, begin + size + (self._rank < left_over)

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the sums over all processes, by one message."""
        flat = self._sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


_PARTS = ("support", "support", "query", "query")
"""Which set each tensor of a `Task` is of."""


def obstacle(problem: Problem, task: Task) -> str | None:
    """Say why a problem's losses are no sums over parts of a task's sets; None: they are."""
    reason = losses_obstacle(problem)
    if reason is not None:
        return reason
    params = {name: t.detach() for name, t in problem.params(problem.start, 0).items()}
    for part in ("support", "query"):
        loss = getattr(problem, part)
        x, y = part_of(task, part)
        if len(x) < 2:
            continue  # it has no parts
        outputs, statistics = apply(loss.network, params, x, precision_=loss.precision)
        if statistics:
            return (
                "the network normalises a set by the statistics of all of it; a network without "
                "batch norm can be divided, as lenet or mlp"
            )
        if mixes(loss.network, params, x):
            return (
                "the network answers an example by the others of its set, so a part of a set does "
                "not tell what the whole does; one that takes each example by itself can be "
                "divided, as lenet or mlp"
            )
        halves = zip(outputs.tensor_split(2), y.tensor_split(2), strict=True)
        apart = torch.stack([len(of_y) / len(y) * loss.loss(out, of_y) for out, of_y in halves])
        if not same(apart.sum(), loss.loss(outputs, y)):
            return f"the {part} loss is no mean over the examples of a set"
    return None


def losses_obstacle(problem: Problem) -> str | None:
    """Say what of an `obstacle` can be told by what the losses are, without calling them."""
    for part in ("support", "query"):
        loss = getattr(problem, part)
        if not isinstance(loss, NetworkLoss) or loss.part != part:
            return f"the {part} loss is the learner's own, which need be no mean over examples"
    return None
