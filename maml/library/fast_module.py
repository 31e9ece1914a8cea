"""A module as it has adapted to one task."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from datasets.tasks import Task
from maml.errors import UserError
from maml.learners import Learner
from maml.metagradient import unrolled
from maml.networks.ordinary import switched
from maml.networks.statistics import Statistics

BatchStatistics = Literal["query", "support"]


class FastModule(nn.Module):
    """Answers queries with the weights that a support set has made.

    Attributes:
        params: ``{name: […]}``, by the learner's names. They are no parameters: where gradients
            were enabled, they are functions of the meta-parameters.
    """

    def __init__(self, learner: Learner, support: Task, steps: int) -> None:
        """Adapt; ``support`` is one task, whose queries nobody reads."""
        super().__init__()
        problem = learner.problem(learner.meta_parameters(), steps)
        found = unrolled.adapt(problem, support, unrolled.by_autograd)
        self.params = problem.params(found, problem.last_step)
        if not torch.is_grad_enabled():  # what stands still is the learner's own memory
            self.params = {name: tensor.clone() for name, tensor in self.params.items()}
        # In a tuple: its parameters are none of this module's.
        self._learner, self._support = (learner,), support

    def forward(self, x: Tensor, batch_statistics: BatchStatistics = "query") -> Tensor:
        """Return the outputs for queries ``x [E, …]``.

        Batch norms normalise by the queries, as the outer loss does; or, so that no answer depends
        on another query, by the statistics of the "support" set.
        """
        if batch_statistics not in get_args(BatchStatistics):
            raise UserError(f"batch_statistics {batch_statistics!r}: query or support")
        (learner,) = self._learner
        with switched(learner.network, training=self.training):
            return self._answers(learner, x, batch_statistics)

    def _answers(self, learner: Learner, x: Tensor, batch_statistics: BatchStatistics) -> Tensor:
        if type(learner).answers is not Learner.answers:
            task = self._support._replace(query_x=x, query_y=self._support.support_y[:0])
            return learner.answers(self.params, task)[batch_statistics == "support"]
        statistics: Statistics | None = None
        if batch_statistics == "support":
            _, statistics = learner.call_network(self.params, self._support.support_x)
        return learner.call_network(self.params, x, statistics or None)[0]
