"""Proto-MAML (Triantafillou et al. 2020, arXiv:1903.03096, section 3)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.embedding import one_hot
from maml.learners.maml import MAML
from maml.learners.objectives import REGRESSION, Given
from maml.learners.protonet import prototypes
from maml.metagradient.problem import Problem
from maml.networks.headless import without_head
from maml.networks.statistics import Statistics
from maml.params import Params, without_prefix

COMPONENTS = {
    "protomaml": {
        "like": "maml",
        "attribute": "ProtoMAML",
        "help": "maml whose output layer begins at the prototypes of the support set",
        "ignores": {"head_init": "takes the output layer off"},
    }
}

WEIGHT, BIAS = "output.weight", "output.bias"
MOVED, INITIAL = "moved.", "initial."


class ProtoMAML(MAML):
    """MAML whose output layer begins, for each task, as the nearest prototype.

    With c_k the mean feature of a class at the initial weights, the weight begins at 2 c_k and the
    bias at −‖c_k‖². A problem states one beginning for all tasks. So what adapts of the layer is
    how far it has moved, from zero; where it began, each loss computes of the support set by the
    initial weights, and the meta-gradient goes through the prototypes. The layer adapts at
    ``--inner-lr``; ``--adapt`` is about the rest of the network.
    """

    any_ways = True

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        if self.objective is REGRESSION:
            raise UserError(
                f"--learner {config.learner}: has prototypes of classes, and the targets of "
                f"--data {config.data} are none"
            )
        self.network, self.n_features = without_head(self.network, config.network)
        there = self.network_weights(self.meta_parameters())
        self.adapting = {name: rate for name, rate in self.adapting.items() if name in there}
        self.still = [name for name in self.still if name in there]

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """MAML's, and an output layer that adapts from the prototypes on."""
        weights = self.network_weights(meta_params)
        some = next(iter(weights.values()))
        moved = {
            MOVED + WEIGHT: some.new_zeros(self.config.ways, self.n_features),
            MOVED + BIAS: some.new_zeros(self.config.ways),
        }
        problem = super().problem(meta_params, steps)
        rates = {name: some.new_ones(()) for name in moved}
        return dataclasses.replace(
            problem,
            start=problem.start | moved,
            fixed=problem.fixed | {INITIAL + name: tensor for name, tensor in weights.items()},
            rates=problem.rates and [of_step | rates for of_step in problem.rates],
            support=self.support_loss,
            query=self.query_loss,
        )

    def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """See `Stated.support_loss`, by the task's own output layer."""
        return super().support_loss(self.with_output(params, task), task, step)

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """See `Stated.query_loss`, by the task's own output layer."""
        return super().query_loss(self.with_output(params, task), task, step)

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        """See `Stated.answers`, by the task's own output layer."""
        return super().answers(self.with_output(params, task), task)

    def with_output(self, params: Params, task: Task) -> Params:
        """Return ``params`` and the output layer: where it begins, and how far it has moved."""
        features, _ = self.call_network(without_prefix(params, INITIAL), task.support_x)
        centres = prototypes(features, one_hot(task.support_y, self.config.ways, features))
        return params | {
            WEIGHT: 2 * centres + params[MOVED + WEIGHT],
            BIAS: params[MOVED + BIAS] - centres.square().sum(1),
        }

    def call_network(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """See `Stated.call_network`: logits ``[E, N]``; without an output layer, features."""
        features, used = super().call_network(params, x, statistics)
        if WEIGHT not in params:
            return features, used
        return features @ params[WEIGHT].T + params[BIAS], used

    def features_of(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """See `Stated.features_of`: the network has no other output."""
        return super().call_network(params, x, statistics)
