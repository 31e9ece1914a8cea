"""A learner's computations of B tasks, one task after the other in each of some threads.

So it is where ``torch.func.vmap`` cannot batch tasks, or where one task is work enough
(``--batching``). What a network draws has the address of the task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maml.execution.threads import spread
from maml.learners.base import Learner
from maml.metagradient import draws
from maml.metagradient.by_task import one_by_one
from maml.metagradient.differentiate import OuterGradient
from maml.params import Params
from maml.seeds import kept


def outer_gradient(
    learner: Learner, meta_params: Params, tasks: Any, ids: Tensor, phase: int
) -> OuterGradient:
    """Return what `Learner.outer_gradient` does, for tasks of the ids ``[B]``."""

    def one(own: Learner, item: tuple[Any, int]) -> OuterGradient:
        task, id = item
        with draws.of_task(_address(learner, "train", id)):
            return own.outer_gradient(meta_params, task, phase, checked=phase in learner.checked)

    before = draws.state()
    sums: Params = {}
    found = []
    with kept() if learner.draws else contextlib.nullcontext():
        for gradients, *rest in spread(learner, one, _items(tasks, ids)):
            sums = {n: sums[n] + g for n, g in gradients.items()} if sums else gradients
            found.append(rest)
    if not learner.draws and draws.state() != before:
        # Somebody has drawn: it may have been the network.
        learner.draws = True
        return outer_gradient(learner, meta_params, tasks, ids, phase)
    learner.checked.add(phase)
    losses, outputs, metrics = zip(*found, strict=True)
    return OuterGradient(
        sums,
        torch.cat(losses),
        torch.cat(outputs) if len({each.shape for each in outputs}) == 1 else outputs[0],
        {name: torch.cat([each[name] for each in metrics]) for name in learner.metric_names},
    )


def evaluated(
    learner: Learner, of: Callable[[Learner, Any], Tensor], tasks: Any, ids: Tensor, split: str
) -> Tensor:
    """Return ``of(learner, tasks)``, ``[B, …]``, for tasks of the ids ``[B]``."""

    def one(own: Learner, item: tuple[Any, int]) -> Tensor:
        task, id = item
        with draws.of_task(_address(learner, split, id)):
            return of(own, task)

    with kept() if learner.draws else contextlib.nullcontext():
        return torch.cat(list(spread(learner, one, _items(tasks, ids))))


def _items(tasks: Any, ids: Tensor) -> list[tuple[Any, int]]:
    """Return each task, a batch of one, with its id."""
    return list(zip(one_by_one(tasks), ids.tolist(), strict=True))


def _address(learner: Learner, split: str, id: int) -> draws.Address:
    return draws.Address(learner.config.seed, split, id) if learner.draws else draws.NONE
