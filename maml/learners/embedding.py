"""Learners without an inner loop: a network's features, and a classifier in closed form on them.

Shape legend: S support and E query examples of a task, F features, N ways.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.base import Learner
from maml.learners.objectives import REGRESSION, Given
from maml.metagradient.problem import Problem
from maml.networks.feature_loss import FeatureLoss, both
from maml.networks.headless import without_head
from maml.networks.statistics import Statistics
from maml.params import Params


class Embedding(Learner):
    """A network whose features tell classes apart by a classifier made of the support set's.

    Nothing adapts step by step: the problem has no inner step, and the outer loss is the
    cross-entropy of the queries. In training, support and query set go through the network as one
    batch, and batch norms use its statistics, as in the released code of both learners here. So do
    the transductive answers. The others normalise the support set by itself, and the queries by the
    support set's statistics. The released codes test with running statistics of training, of which
    there are none here.

    Training may have other ways and shots than the test: ``--train-ways``, ``--train-shots``.
    """

    any_ways = True
    NO_SAY = dict.fromkeys(("support_loss", "set_loss"), "query_loss")
    NOT_ALONE: ClassVar[Mapping[str, str]] = {"problem": "training_problem"}

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        if self.objective is REGRESSION:
            raise UserError(
                f"--data {config.data}: its targets are no classes, which --learner "
                f"{config.learner} tells apart"
            )
        # A module at hand that does not say which its output layer is has none.
        if given is None or getattr(self.network, "head_prefix", None) is not None:
            self.network, _ = without_head(self.network, config.network)

    @abstractmethod
    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Return logits ``[E, N]`` of queries.

        Args:
            params: All meta-parameters, without prefix those of the network.
            support: Features ``[S, F]``.
            one_hot: Their classes, ``[S, N]`` of zeros and ones.
            query: Features ``[E, F]``.
        """

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """No inner step: the query loss, by weights that all tasks share."""
        return self._problem(meta_params, self.config.ways)

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """The same with ``--train-ways``."""
        return self._problem(meta_params, self.config.train_ways or self.config.ways)

    def _problem(self, meta_params: Params, ways: int) -> Problem:
        own = {name: p for name, p in meta_params.items() if not name.startswith("network.")}
        fixed = self.network_weights(meta_params) | own
        query = self.query_loss
        plainly = self._is_own("loss") and self._is_own("call_network")
        if plainly and self._is_own("query_loss", Embedding):
            query = self._feature_loss(ways)
        # There is no step, so nobody asks for the support loss.
        return Problem(start={}, support=query, query=query, fixed=fixed, steps=0)

    def _feature_loss(self, ways: int) -> FeatureLoss:
        return FeatureLoss(
            self.network, self.logits, ways, self.objective.loss, self.config.precision
        )

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the queries, and their logits."""
        loss = self._feature_loss(self.config.train_ways or self.config.ways)
        features, _ = self.call_network(params, both(task))
        outputs = loss.of_features(params, features, task)
        return self.loss(outputs, task.query_y), outputs

    def features_of(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """See `Learner.features_of`: the network has no other output."""
        return self.call_network(params, x, statistics)

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        """See `Learner.answers`: normalised with the support set, and by its statistics."""
        loss = self._feature_loss(self.config.ways)
        together, _ = self.call_network(params, both(task))
        support, of_support = self.call_network(params, task.support_x)
        jointly = loss.of_features(params, together, task)
        if not of_support:
            return jointly, jointly
        query, _ = self.call_network(params, task.query_x, of_support)
        return jointly, loss.of_features(params, torch.cat([support, query]), task)

    def _answers_plainly(self) -> bool:
        return self._is_own("answers", Embedding) and self._is_own("call_network")
