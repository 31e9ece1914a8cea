"""What a run tells of its inner loop, beside the scores of its validations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasets.words import counted
from maml.config import registry
from maml.learners import Learner
from maml.params import Params
from maml.worker import Worker

TASKS = 16
"""So many validation tasks are followed step by step: enough to see whether adapting helps."""
STEPS = 10
"""Where there are more inner steps, only these are looked at: none, half of them, all."""
CLEARLY = 0.05
"""Accuracy that must be lost by more steps, before fewer are advised."""
ERRORS = 4.0
"""So many standard errors it must be, too: tasks are few, and several steps are compared."""


class Insight:
    """Follows the inner loop on validation tasks, computed in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # The latest scores of each task by the number of steps, and of which iteration they are.
        self._after: dict[int, Tensor] = {}
        self._of: int | None = None

    def row(self, meta_params: Params, iteration: int) -> dict[str, Any]:
        """Return what the inner loop does to validation tasks.

        Returns:
            ``after``: by the number of inner steps, the mean accuracy of `TASKS` tasks (of a
            regression, the loss), normalised as the run's headline. ``rates``: where inner rates
            are learned, the mean of each tensor's, by step. Empty for what has no few-shot tasks.
        """
        if not self._follows:
            return {}
        self._look(meta_params, iteration)
        found: dict[str, Any] = {}
        if self._after:
            found["after"] = {str(n): float(scores.mean()) for n, scores in self._after.items()}
        return found | _rates(self._worker, meta_params)

    def advice(self, meta_params: Params, iteration: int) -> str:
        """Return a line where fewer inner steps would be better at validation, or ""."""
        if not self._follows or "accuracy" not in self._worker.learner.metric_names:
            return ""
        if self._of != iteration:
            self._look(meta_params, iteration)
        return fewer_steps(self._after)

    @property
    def _follows(self) -> bool:
        return registry.learner(self._worker.config.learner).tasks == "episodes"

    @torch.no_grad()
    def _look(self, meta_params: Params, iteration: int) -> None:
        worker, config, learner = self._worker, self._worker.config, self._worker.learner
        self._after, self._of = {}, iteration
        most = config.eval_inner_steps
        if not most:
            return
        params = {name: tensor.detach().to(worker.device) for name, tensor in meta_params.items()}
        name = ("" if config.transductive else "non_transductive_") + (
            "accuracy" if "accuracy" in learner.metric_names else "loss"
        )
        for n in range(most + 1) if most <= STEPS else (0, most // 2, most):

            def of(own: Learner, tasks: Any, n: int = n) -> Tensor:
                return own.scores(own.predictions(params, tasks, n), tasks.query_y)[name]

            scores = worker.evaluated(learner, "validation", torch.arange(TASKS), of)
            self._after[n] = torch.cat(scores)


def fewer_steps(after: Mapping[int, Tensor]) -> str:
    """Return a line where the last inner step leaves accuracy clearly below an earlier one, or "".

    Args:
        after: By the number of inner steps, the accuracies of the same tasks, ``[T]`` each.
    """
    if not after:
        return ""
    most, best = max(after), max(after, key=lambda n: float(after[n].mean()))
    # Task by task: what tasks differ in says nothing about steps.
    lost = (after[best] - after[most]).double()
    if not lost.mean() > max(CLEARLY, ERRORS * float(lost.std()) / len(lost) ** 0.5):
        return ""
    reached, left = (100 * float(after[n].mean()) for n in (best, most))
    fewer = f"--eval-inner-steps {best}, or " if best else ""
    return (
        f"after {counted(most, 'inner step')} validation accuracy is {left:.0f} %, after {best} it "
        f"is {reached:.0f} % ({counted(len(lost), 'task')}): try {fewer}a lower --inner-lr"
    )


def _rates(worker: Worker, meta_params: Params) -> dict[str, Any]:
    """Return the mean of each tensor's inner rate, by step, where they are learned."""
    leaves = {
        name: tensor.detach().to(worker.device).requires_grad_()
        for name, tensor in meta_params.items()
    }
    problem = worker.learner.problem(leaves, max(1, worker.config.inner_steps))
    # Rates that lead to no meta-parameter are as they were stated.
    if not any(rate.requires_grad for of_step in problem.rates or () for rate in of_step.values()):
        return {}
    return {
        "rates": {
            f"{step}/{name}": problem.lr * float(rate.mean().detach())
            for step, of_step in enumerate(problem.rates or (), 1)
            for name, rate in of_step.items()
        }
    }
