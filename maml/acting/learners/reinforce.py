"""REINFORCE (Williams 1992, doi:10.1007/BF00992696): one policy, no inner loop."""

from typing import Any

import torch
from torch import Tensor

from datasets.environments.acting import Trajectory
from datasets.tasks import Task
from maml.acting.policy import Played, Policy, first_return
from maml.learners.noadapt import NoAdaptation
from maml.params import Params

COMPONENTS = {
    "reinforce": {
        "attribute": "Reinforce",
        "adapts_at_test": False,
        "help": "REINFORCE: one policy for all environments, without an inner loop",
        "tasks": "environments",
        "strategy": "observers",
        "reads": ("discount", "queries", "eval_queries"),
        "refuses": {
            "kernels": {"native": "has no inner loop"},
            "meta_gradient": {"mixed": "has no inner loop"},
            "ps_forward": {"remote": "acts with the policy where the environments are"},
        },
    }
}

SHORTEST = 8
"""Steps of a short episode: training has first states for T // SHORTEST + 1 episodes."""


class Reinforce(Policy, NoAdaptation):
    """The policy gradient of T steps in each environment. Episodes follow one another.

    A return is the discounted reward from a step to the end of its episode. Each environment's
    returns are normalised by their mean and deviation, as in torch's example of batched RPC.
    """

    also = "episodes"  # how many have ended

    def sizes(self, *, evaluation: bool) -> dict[str, int]:
        """See `Policy.sizes`: no support episodes; first states for many of `SHORTEST` steps."""
        starts = 1 if evaluation else self.config.horizon // SHORTEST + 1
        return super().sizes(evaluation=evaluation) | {"shots": 0, "starts": starts}

    def query_loss(self, params: Params, task: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return a loss whose gradient is REINFORCE's, and whose value is minus the return."""
        played: Trajectory = task.query
        logp = self.log_probabilities(params, played)
        advantage = _normalised(returns_to_go(played, self.config.discount), played.alive)
        surrogate = -(logp * advantage).sum() / played.alive.sum()
        return surrogate - surrogate.detach() - task.query_y[1], task.query_y

    @torch.no_grad()
    def materialise(
        self, meta_params: Params, tasks: Task | Played, phase: int | None = None
    ) -> Played:
        """Play T steps in each environment, unless ``tasks`` are played already."""
        if isinstance(tasks, Played):
            return tasks
        problem = self.stated(meta_params, phase)
        params = problem.params(problem.start, 0)
        return as_played(self.act(params, tasks.query_x, tasks.query_y, each=False))


def as_played(query: Trajectory) -> Played:
    """Return the trajectory ``query`` of B tasks in the form that the losses read."""
    n_ended = query.ends.sum((-2, -1))
    return Played((), query, torch.stack([n_ended, first_return(query)], dim=-1))


def returns_to_go(played: Trajectory, discount: float) -> Tensor:
    """Return the discounted reward from each step to the end of its episode: ``[…, T]``."""
    found = torch.empty_like(played.rewards)
    after = torch.zeros_like(played.rewards[..., 0])
    for step in reversed(range(found.shape[-1])):
        after = played.rewards[..., step] + discount * after * (1 - played.ends[..., step])
        found[..., step] = after
    return found


def _normalised(values: Tensor, alive: Tensor) -> Tensor:
    """Return ``values [E, T]`` minus each environment's mean, divided by its deviation."""
    count = alive.sum(-1, keepdim=True)
    centred = (values - (values * alive).sum(-1, keepdim=True) / count) * alive
    deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    return centred / (deviation + 1e-6)
