"""Reptile (Nichol et al. 2018, arXiv:1803.02999)."""

import dataclasses

import torch
from torch import nn

from datasets.episodes import Episodes, shuffled
from maml.config import Config
from maml.learners.adapting import tree
from maml.learners.data import training_task
from maml.learners.maml import MAML
from maml.learners.objectives import Given
from maml.metagradient.problem import Problem
from maml.metagradient.rules import Moment
from maml.networks.loss import MiniBatches
from maml.params import Params, without_prefix

COMPONENTS = {
    "reptile": {
        "like": "maml",
        "attribute": "Reptile",
        "help": "moves the initial weights towards the adapted ones",
        "reads": ("train_shots", "inner_batch", "eval_inner_batch", "keep_moment"),
        "ignores": {"order": "has no pass back: its gradient is a difference"},
        "refuses": {
            "meta_gradient": {"reverse": "has no pass back: its gradient is a difference"},
            "inner_steps": {0: "would not move"},
        },
    }
}  # fmt: skip


class Reptile(MAML):
    """Initial weights whose gradient is the inner loop's displacement of them, reversed.

    The inner loop takes mini-batches of the support set (``--inner-batch``), which run through one
    random order after another. Each training task's support set has its own random order. The order
    of a pass has an address as well (the seed, the pass). The query set serves only for reports.

    ``--keep-moment`` makes the second moment of the inner Adam a meta-parameter, with which each
    task begins, also at test. The meta-step moves it towards the mean over tasks of the final
    moments. docs/learners.md has the protocol of the released code, and what differs here.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        self.keeps_moment = config.keep_moment and config.inner_optimizer == "adam0"
        if self.keeps_moment:
            weights = self.network_weights(self.meta_parameters())
            # The moment of ``network.…`` has the name ``second_moment.…``.
            self.second_moment = tree({n: torch.zeros_like(weights[n]) for n in self.adapting})
            self.second_moment_weight = nn.Parameter(next(iter(weights.values())).new_zeros(()))

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Episodes:
        """Return the tasks of ``split``. Shuffle support sets of training for ``--inner-batch``."""
        found = super().open_tasks(split, evaluation=evaluation)
        in_parts = not evaluation and self.config.inner_batch is not None
        return shuffled(found, self.config.seed) if in_parts else found

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the problem of evaluation: MAML's, on mini-batches of ``--eval-inner-batch``."""
        problem = super().problem(meta_params, steps)
        task = self.config.ways, self.config.shots
        return self._of_batches(problem, meta_params, self.config.eval_inner_batch, task)

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """Return the same on mini-batches of ``--inner-batch``, with displacement as gradient."""
        config = self.config
        problem = self.problem(meta_params, config.inner_steps)
        problem = self._of_batches(problem, meta_params, config.inner_batch, training_task(config))
        return dataclasses.replace(problem, displacement=True)

    def _examples(self, batch: int | None, task: tuple[int, int]) -> int:
        """Return how many examples a step sees of a ``task`` of so many ways and shots."""
        ways, shots = task
        there = ways * shots if self.contents.classifies else shots
        return there if batch is None else min(batch, there)

    def _of_batches(
        self, problem: Problem, meta_params: Params, batch: int | None, task: tuple[int, int]
    ) -> Problem:
        """Return ``problem`` on mini-batches. Adam begins with the kept moment, scaled for them.

        A sum's gradient is n times the mean's gradient over n examples; its square is n² times.
        """
        support = problem.support
        if isinstance(support, MiniBatches):
            support = support.loss
        if batch is not None:
            support = MiniBatches(support, self.config.seed, batch)
        problem = dataclasses.replace(problem, support=support)
        if not self.keeps_moment:
            return problem
        trained_on = self._examples(self.config.inner_batch, training_task(self.config))
        scale = (trained_on / self._examples(batch, task)) ** 2
        total = without_prefix(meta_params, "second_moment.")
        if scale != 1:
            total = {name: tensor * scale for name, tensor in total.items()}
        moment = Moment(total, meta_params["second_moment_weight"])
        return dataclasses.replace(problem, second_moment=moment)
