"""What a run's log tells of the inner loop, beside the scores of its validations."""

from __future__ import annotations

from typing import Any

import torch

from maml.config import registry
from maml.params import Params
from maml.worker import Worker

TASKS = 16
"""So many validation tasks are followed step by step: enough to see whether adapting helps."""
STEPS = 10
"""Where there are more inner steps, only these are looked at: none, half of them, all."""


@torch.no_grad()
def inner_loop(worker: Worker, meta_params: Params) -> dict[str, Any]:
    """Return what the inner loop does to validation tasks, computed in this process.

    Returns:
        ``after``: by the number of inner steps, the mean accuracy of `TASKS` tasks (of a
        regression, the loss), normalised as the run's headline. ``rates``: where inner rates are
        learned, the mean of each tensor's, by step. Empty for what has no few-shot tasks.
    """
    config, learner = worker.config, worker.learner
    if registry.learner(config.learner).tasks != "episodes":
        return {}
    params = {name: tensor.detach().to(worker.device) for name, tensor in meta_params.items()}
    found: dict[str, Any] = {}
    most = config.eval_inner_steps
    steps = range(most + 1) if most <= STEPS else (0, most // 2, most)
    if most:
        name = ("" if config.transductive else "non_transductive_") + (
            "accuracy" if "accuracy" in learner.metric_names else "loss"
        )
        tasks = worker.evaluation("validation").tasks(torch.arange(TASKS))
        tasks = type(tasks)(*(part.to(worker.device) for part in tasks))
        found["after"] = {}
        for n in steps:
            scores = learner.scores(learner.predictions(params, tasks, n), tasks.query_y)
            found["after"][str(n)] = float(scores[name].mean())
    with torch.enable_grad():
        leaves = {name: tensor.requires_grad_() for name, tensor in params.items()}
        problem = learner.problem(leaves, max(1, config.inner_steps))
    # Rates that lead to no meta-parameter are as they were stated.
    if any(rate.requires_grad for of_step in problem.rates or () for rate in of_step.values()):
        found["rates"] = {
            f"{step}/{name}": problem.lr * float(rate.mean())
            for step, of_step in enumerate(problem.rates or (), 1)
            for name, rate in of_step.items()
        }
    return found
