"""Pre-train a classifier, then use the nearest centroid or a head tuned to the support set.

The baselines of Chen et al. 2019 (arXiv:1904.04232, section 3.2) and Wang et al. 2019
(arXiv:1911.04623). They do not learn to learn.
"""

import contextlib
import copy
import dataclasses

import numpy as np
import torch
from torch import Tensor

from datasets.batches import Batches, Examples
from datasets.episodes import Episodes, FewShotImages
from datasets.errors import DataError
from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.base import Adapted
from maml.learners.embedding import one_hot, prototypes, squared_distances
from maml.learners.noadapt import NoAdaptation
from maml.metagradient import unrolled
from maml.metagradient.by_task import each_task
from maml.metagradient.problem import Problem
from maml.networks.headless import without_head
from maml.networks.statistics import OneValueError
from maml.params import Params

COMPONENTS = {
    "finetune": {
        "attribute": "Finetune",
        "help": "a classifier of all training classes, then nearest centroid or a tuned head",
        "reads": (
            "train_ways", "batch_size", "inner_lr", "eval_inner_steps", "inner_optimizer",
            "inner_momentum", "shots", "eval_queries",
        ),
    }
}  # fmt: skip

HEAD = "tuned."


class Finetune(NoAdaptation):
    """An ordinary classifier of the training classes, whose features serve new classes.

    Training is supervised: a task is a mini-batch of ``--batch-size`` images of all classes of the
    training split (``--train-ways`` is their number). At test the features stand still. Without
    inner steps (``--eval-inner-steps 0``, or `python -m maml.evaluate RUN_DIR --steps 0`) a query
    gets the class of the nearest support centroid. With inner steps, a linear head begins at zero
    and descends the cross-entropy of the support set (`support_loss`). `set_loss` and `query_loss`
    are the losses of training.
    """

    any_ways = True

    def __init__(self, config: Config) -> None:
        if config.train_ways is None:
            raise UserError(
                f"--learner {config.learner}: --train-ways must say how many classes the training "
                "split has"
            )
        super().__init__(config)
        _, self.n_features = without_head(copy.deepcopy(self.network), config.network)

    def outputs(self, config: Config) -> int:
        """Return the number of training classes."""
        return config.train_ways or 0

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Episodes:
        """Return mini-batches of the training classes to learn from, or few-shot tasks."""
        found = super().open_tasks(split, evaluation=True)
        if evaluation:
            return found
        config = self.config
        if not isinstance(found, FewShotImages):
            raise DataError(f"--data {config.data}: has no images for --learner finetune")
        if len(found.first) != config.train_ways:
            raise DataError(
                f"--train-ways {config.train_ways}: the {split} split of --data {config.data} has "
                f"{len(found.first)} classes; give --train-ways {len(found.first)}"
            )
        rows = [np.arange(n) + first for first, n in zip(found.first, found.counts, strict=True)]
        labels = np.repeat(np.arange(len(rows), dtype=np.int64), found.counts)
        examples = Examples(found.images, np.concatenate(rows), labels)
        batches = Batches(
            examples, split=split, batch_size=config.batch_size, seed=config.seed, dtype=found.dtype
        )
        batches.class_names = found.class_names
        return batches

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """Return the problem of training: the classifier's loss of a mini-batch, no inner step."""
        return super().problem(meta_params, 0)

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the problem of evaluation: a linear head adapts, the features stand still."""
        some = next(iter(meta_params.values()))
        ways = self.config.ways
        start = {
            f"{HEAD}weight": some.new_zeros(ways, self.n_features),
            f"{HEAD}bias": some.new_zeros(ways),
        }
        return Problem(
            start=start if steps else {},
            fixed=self.network_weights(meta_params),
            **self.stated_losses(),
            optimizer=self.config.inner_optimizer,
            momentum=self.config.inner_momentum,
            lr=self.config.inner_lr,
            steps=steps,
        )

    @torch.no_grad()
    def adapt(self, meta_params: Params, tasks: Task, steps: int) -> Adapted:
        """See `Learner.adapt`. Compute the features once, because they stand still."""
        if not (self.inherits("support_loss", Finetune) and self.inherits("problem", Finetune)):
            return super().adapt(meta_params, tasks, steps)
        problem = self.problem(meta_params, steps)
        of_features = dataclasses.replace(problem, support=self._loss_of_features)

        def one(task: Task) -> Params:
            features, _ = self.features_of(problem.fixed, task.support_x)
            return unrolled.adapt(of_features, task._replace(support_x=features))

        return Adapted(problem, each_task(one, self.batching)(tasks) if steps else {})

    def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the support set's cross-entropy with the tuned head, and the logits."""
        features, _ = self.features_of(params, task.support_x)
        return self._loss_of_features(params, task._replace(support_x=features), step)

    def _loss_of_features(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss of a task whose support set is given as features ``[S, F]``."""
        logits = _tuned(params, task.support_x)
        return self.loss(logits, task.support_y), logits

    def answers(self, params: Params, task: Task) -> tuple[Tensor | None, Tensor]:
        """See `Learner.answers`: the support set is always normalised by itself."""
        support, statistics = self.features_of(params, task.support_x)

        def logits(query: Tensor) -> Tensor:
            if f"{HEAD}weight" in params:
                return _tuned(params, query)
            classes = one_hot(task.support_y, self.config.ways, support)
            return -squared_distances(query, prototypes(support, classes))

        transductive: Tensor | None = None
        with contextlib.suppress(OneValueError):
            transductive = logits(self.features_of(params, task.query_x)[0])
        alone, _ = self.features_of(params, task.query_x, statistics)
        return transductive, logits(alone)


def _tuned(params: Params, features: Tensor) -> Tensor:
    return features @ params[f"{HEAD}weight"].T + params[f"{HEAD}bias"]
