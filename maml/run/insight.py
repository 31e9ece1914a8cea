"""What a validation tells of the inner loop, beside its scores."""

from typing import Any

import torch
from torch import Tensor

from maml.config import registry
from maml.learners import Learner
from maml.params import Params
from maml.worker import Worker

TASKS = 16
"""So many validation tasks are followed step by step: enough to see whether adapting helps."""
STEPS = 10
"""Where there are more inner steps, only these are looked at: none, half of them, all."""


def inner_loop(worker: Worker, meta_params: Params) -> dict[str, Any]:
    """Return what the inner loop does to validation tasks; nothing where tasks are not few-shot.

    ``after`` is, by the number of inner steps, the mean accuracy of `TASKS` tasks (of a regression,
    the loss), normalised as the run's headline; ``rates`` the mean of each tensor's learned ones.
    """
    if registry.learner(worker.config.learner).tasks != "episodes":
        return {}
    params = {name: tensor.detach().to(worker.device) for name, tensor in meta_params.items()}
    return _after(worker, params) | _rates(worker, params)


@torch.no_grad()
def _after(worker: Worker, params: Params) -> dict[str, Any]:
    most = worker.config.eval_inner_steps
    if not most:
        return {}
    name = ("" if worker.config.transductive else "non_transductive_") + (
        "accuracy" if "accuracy" in worker.learner.metric_names else "loss"
    )
    after = {}
    for n in range(most + 1) if most <= STEPS else (0, most // 2, most):

        def of(own: Learner, tasks: Any, n: int = n) -> Tensor:
            return own.scores(own.predictions(params, tasks, n), tasks.query_y)[name]

        scores = worker.evaluated(worker.learner, "validation", torch.arange(TASKS), of)
        after[str(n)] = float(torch.cat(scores).mean())
    return {"after": after}


def _rates(worker: Worker, params: Params) -> dict[str, Any]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
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
