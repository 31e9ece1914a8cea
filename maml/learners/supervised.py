"""Supervised learning: ordinary classification, a task being a mini-batch without an inner loop.

Whatever trains a meta-learner trains a classifier then: the same strategies, logs and checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datasets import open_batches
from datasets.batches import Batches
from datasets.tasks import Task
from maml.config import Config
from maml.learners.base import Learner
from maml.learners.data import data_options
from maml.learners.objectives import RANKED_CLASSIFICATION
from maml.metagradient.inner import Params

COMPONENTS = {
    "supervised": {
        "attribute": "Supervised",
        "help": "ordinary classification: a task is a mini-batch, without an inner loop",
        "tasks": "batches",
        "reads": ("batch_size", "epochs"),
        "refuses": {
            "kernels": {"native": "has no inner loop"},
            "meta_gradient": {"mixed": "has no inner loop"},
        },
    }
}


class Supervised(Learner):
    """One set of weights for all tasks: the loss of the query set, which is a mini-batch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.objective = RANKED_CLASSIFICATION
        self.metric_names = self.objective.names

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Batches:
        """Return mini-batches of ``split``."""
        config = self.config
        return open_batches(
            config.data,
            split,
            evaluation=evaluation,
            batch_size=config.batch_size,
            ways=config.ways,
            seed=config.seed,
            data_root=config.data_root,
            dtype=getattr(torch, config.dtype),
            **data_options(config),
        )

    def outer_loss(self, meta_params: Params, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy of the mini-batch, normalised by its own statistics."""
        loss, outputs = self.set_loss(self.network_weights(meta_params), task.query_x, task.query_y)
        return loss, self.objective.metrics(outputs.detach(), task.query_y)

    def adapted(self, meta_params: Params, task: Task, steps: int) -> Params:
        """Return the weights as they are; evaluation has training examples for a support set."""
        return self.network_weights(meta_params)
