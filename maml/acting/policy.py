"""What learners of policies share: acting, and the probability of the actions taken.

A policy's task materialises by acting: `Learner.materialise` plays the task, with parameters as
constants. The losses then read the observations and actions, so they are pure functions as every
loss here. The code that differentiates and distributes a classifier also serves a policy.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from datasets import open_environments
from datasets.environments.acting import Acting, Environment, Trajectory, play
from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.base import Learner
from maml.learners.data import data_options
from maml.metagradient import draws
from maml.metagradient.by_task import each_task
from maml.metagradient.problem import Problem
from maml.params import Params

SPREAD = 0.05
"""Standard deviation of each coordinate of a continuous action. It is also the unit of a policy's
outputs, so that the outputs and their gradients have the size of logits."""


class Played(NamedTuple):
    """B tasks that were played.

    Attributes:
        support: The episodes of each inner step: `Trajectory` of ``[B, steps, K, T, …]``.
        query: `Trajectory` of ``[B, Q, T, …]``.
        query_y: ``[B, 2]``, measured while acting: the learner's own number (`Policy.also`), and
            the mean return of the query's first episodes.
    """

    support: Trajectory | tuple[()]
    query: Trajectory
    query_y: Tensor


class Policy(Learner):
    """A learner whose network outputs logits of actions, or the mean of a continuous action.

    Attributes:
        also: Name of the metric in addition to the return: the first number of `Played.query_y`.
    """

    also: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.metric_names = ("return", self.also)

    def prepare(self, device: torch.device) -> None:
        """See `Learner.prepare`. Raise `UserError` if an action depends on other environments."""
        super().prepare(device)
        seen = torch.randn(4, self.environment.observation_size, generator=torch.Generator())
        problem = self.stated(self.meta_parameters(), self.last_phase)
        params = {n: p.to(device) for n, p in problem.params(problem.start, 0).items()}
        seen = seen.to(next(iter(params.values())))
        if self.mixes(seen) or self.call_network(params, seen)[1]:
            raise UserError(
                f"--network {self.config.network}: an action depends on what is seen in other "
                "environments and at other steps, as by batch norm; give it only layers that treat "
                "each observation alone"
            )

    def stated(self, meta_params: Params, phase: int | None) -> Problem:
        """Return the problem of training in a ``phase``; None: of an evaluation."""
        with draws.at("problem", 0):
            if phase is None:
                return self.problem(meta_params, self.config.eval_inner_steps)
            return self.training_problem(meta_params, phase)

    @functools.cached_property
    def environment(self) -> Environment:
        """The environment that the policy acts in."""
        return self.open_tasks("train").environment

    def sizes(self, *, evaluation: bool) -> dict[str, int]:
        """Return how many support and query episodes a task has, and how many first states an
        environment has, one after the other.
        """
        config = self.config
        queries = config.eval_queries if evaluation else config.queries
        return {"shots": config.shots, "queries": queries, "starts": 1}

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Acting:
        """Return the environments of ``split``."""
        request = self.sizes(evaluation=evaluation) | data_options(self.config)
        return open_environments(self.config.data, split, **request)

    def choose(self, outputs: Tensor, draws: Tensor) -> Tensor:
        """Return actions from the network's outputs ``[…, outputs]`` and uniform ``[…, D]``."""
        if self.environment.discrete:
            below = outputs.softmax(-1).cumsum(-1)[..., :-1]
            return (draws >= below).sum(-1)
        # A draw of 0 would give an infinite action: take the middle of the draw's cell.
        normal = torch.special.ndtri(draws.clamp(2.0**-54, 1 - 2.0**-53))
        return SPREAD * (outputs + normal.to(outputs.dtype))

    def log_probability(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability (or log-density) of ``actions``: ``[…]``."""
        if self.environment.discrete:
            chosen = outputs.log_softmax(-1).gather(-1, actions[..., None])
            return chosen.squeeze(-1)
        away = (actions / SPREAD - outputs).square().sum(-1)
        return -0.5 * away - outputs.shape[-1] * math.log(SPREAD * math.sqrt(2 * math.pi))

    @torch.no_grad()
    def act(self, params: Params, first: Tensor, draws: Tensor, *, each: bool) -> Trajectory:
        """Play all episodes at once: ``first [B, E, R, S]``, ``draws [B, E, T, D]``; B is optional.

        ``params`` are a problem's, with a leading B if ``each`` task has its own.
        """
        dtype = next(iter(params.values())).dtype
        policy = each_task(self.actions, self.batching) if each else self.actions

        def choose(observations: Tensor, draws: Tensor) -> Tensor:
            actions: Tensor = policy(params, observations.to(dtype), draws)
            return actions

        return play(self.environment, first, draws, choose, dtype)

    def actions(self, params: Params, observations: Tensor, draws: Tensor) -> Tensor:
        """Return one policy's actions for ``observations […, O]``, from uniform ``[…, D]``."""
        return self.choose(self._outputs(params, observations), draws)

    def _outputs(self, params: Params, observations: Tensor) -> Tensor:
        outputs, _ = self.call_network(params, observations.flatten(0, -2))
        return outputs.unflatten(0, observations.shape[:-1])

    def log_probabilities(self, params: Params, played: Trajectory) -> Tensor:
        """Return the log-probability of each action of one task, 0 without action: ``[E, T]``."""
        outputs = self._outputs(params, played.observations)
        return self.log_probability(outputs, played.actions) * played.alive

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the mean return of the query's first episodes, and the metric `also`."""
        return {"return": y[..., 1], self.also: y[..., 0]}

    @torch.no_grad()
    def evaluate(self, meta_params: Params, tasks: Task) -> dict[str, Tensor]:
        """Return each task's scores after ``--eval-inner-steps``; ``loss`` is minus the return."""
        played = self.materialise(meta_params, tasks)
        found = self.metrics(played.query_y, played.query_y)
        found = {"loss": -played.query_y[..., 1], **found}
        # Batch statistics play no part, so both are the same.
        return found | {f"non_transductive_{name}": value for name, value in found.items()}


def first_return(played: Trajectory) -> Tensor:
    """Return the mean, over environments, of the return of their first episode: ``[…]``.

    Not of all episodes, because a fixed number of steps holds more short episodes than long ones.
    """
    before = played.ends.cumsum(-1) - played.ends
    return (played.rewards * (before == 0)).sum(-1).mean(-1)
