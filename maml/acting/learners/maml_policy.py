"""MAML for policies (Finn et al. 2017, arXiv:1703.03400, algorithm 3)."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.environments.acting import Trajectory
from datasets.tasks import Task
from maml.acting.policy import Played, Policy, first_return
from maml.learners.maml import MAML
from maml.metagradient.by_task import each_task
from maml.metagradient.problem import Problem
from maml.metagradient.unrolled import trajectory
from maml.params import Params

COMPONENTS = {
    "maml-policy": {
        "attribute": "MAMLPolicy",
        "help": "an initial policy from which a few policy-gradient steps suit a task",
        "tasks": "environments",
        "reads": (
            "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "order", "shots",
            "queries", "eval_queries", "discount",
        ),
        "refuses": {
            "kernels": {"native": "has a loss of its own"},
            "ps_forward": {"remote": "acts with the policy where the environments are"},
        },
    }
}  # fmt: skip

_TURN = 0.6180339887498949
"""Shift of the uniform numbers from one inner step to the next: the golden ratio's fraction."""


class MAMLPolicy(Policy, MAML):
    """Weights whose return is high after inner steps along policy gradients.

    The inner loop descends an estimate of −J/T (return per step) from K support episodes. The outer
    loss is the same estimate from Q query episodes of the adapted policy. DiCE makes the
    second-order term: the outer gradient is that of J(θ − α ∇J) (arXiv:1810.06784, formulation II).
    """

    also = "return_before"  # of support episodes, before adaptation

    def support_loss(self, params: Params, task: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return the surrogate of the episodes that were played before inner step ``step``."""
        played = pytree.tree_map(lambda part: part[step], task.support)
        return self._loss(params, played), task.query_y

    def query_loss(self, params: Params, task: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return the surrogate of the adapted policy's episodes. Its value is minus the return."""
        surrogate = self._loss(params, task.query)
        return surrogate - surrogate.detach() - task.query_y[1], task.query_y

    def _loss(self, params: Params, played: Trajectory) -> Tensor:
        config = self.config
        lasted = played.rewards.shape[1]
        steps = torch.arange(lasted, dtype=played.rewards.dtype, device=played.rewards.device)
        rewards = played.rewards * config.discount**steps
        return -dice(self.log_probabilities(params, played), rewards) / config.horizon

    @torch.no_grad()
    def materialise(self, meta_params: Params, tasks: Task, phase: int | None = None) -> Played:
        """Play each inner step's support episodes and take the step; then play the queries."""
        problem = self.stated(meta_params, phase)
        played: list[Trajectory] = []
        for step in range(problem.steps):
            adapted = self._after(problem, tasks, played)
            # Each step gets other uniform numbers: all are shifted modulo 1.
            draws = (tasks.support_y + step * _TURN) % 1.0
            played.append(self.act(adapted, tasks.support_x, draws, each=step > 0))
        adapted = self._after(problem, tasks, played)
        query = self.act(adapted, tasks.query_x, tasks.query_y, each=bool(played))
        after = first_return(query)
        before = first_return(played[0]) if played else after
        support = self._stacked(played) if played else ()
        return Played(support, self._cut(query, 2), torch.stack([before, after], dim=-1))

    def _after(self, problem: Problem, tasks: Task, played: list[Trajectory]) -> Params:
        """Return each task's weights after the inner steps on ``played``; if empty, the start."""
        if not played:
            return problem.params(problem.start, 0)
        steps = len(played)
        nothing = played[0].rewards.new_empty(len(tasks.query_x), 0)
        made = Played(self._stacked(played), played[0], nothing)

        def after(task: Played) -> Params:
            *_, weights = itertools.islice(trajectory(problem, task), steps)
            return problem.params(weights, min(steps, problem.last_step))

        after_each: Params = each_task(after, self.batching)(made)
        return after_each

    def _stacked(self, played: list[Trajectory]) -> Trajectory:
        joined = Trajectory(*(torch.stack(parts, dim=1) for parts in zip(*played, strict=True)))
        return self._cut(joined, 3)

    def _cut(self, played: Trajectory, dim: int) -> Trajectory:
        """Cut off the steps of dimension ``dim`` without any action: they add nothing to a loss."""
        if self.plan.draws:  # a shorter set would get other draws after a later inner step
            return played
        lasted = int(played.alive.sum(dim).max())
        return Trajectory(*(part.narrow(dim, 0, lasted) for part in played))


def dice(logp: Tensor, rewards: Tensor) -> Tensor:
    """Return DiCE (Foerster et al. 2018, arXiv:1802.05098), equations 5 and 10, a scalar.

    Its value is the mean return of E episodes. Each of its derivatives is an unbiased estimate of
    J's. ``logp [E, T]`` is of the actions taken, and ``rewards [E, T]`` are discounted.
    """
    weights = rewards.new_full((len(rewards),), 1 / len(rewards))
    reward = (_magic(logp.cumsum(-1)) * rewards).sum(-1)
    # The baseline is zero in value, and its derivatives are zero in expectation.
    baseline = ((1 - _magic(logp)) * _baseline(rewards, weights)).sum(-1)
    return weights @ (reward + baseline)


def _magic(x: Tensor) -> Tensor:
    """Return 1, with a derivative: x's derivative times the result itself."""
    return torch.exp(x - x.detach())


def _baseline(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the other episodes' mean reward from each step on: ``[E, T]``."""
    # Leave out the episode's own return: it depends on the episode's actions, so it would bias.
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    if len(weights) == 1:
        return torch.zeros_like(to_go)
    own = weights[:, None]
    return (weights @ to_go - own * to_go) / (1 - own)
