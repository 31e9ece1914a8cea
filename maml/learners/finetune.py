"""Pre-train a classifier, then the nearest centroid, or a head that is tuned to the support set.

The baselines of Chen et al. 2019 (arXiv:1904.04232, section 3.2) and of nearest centroids as in
arXiv:1911.04623: no learning to learn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from datasets.batches import Batches, Examples
from datasets.episodes import Episodes, FewShotImages
from datasets.errors import DataError
from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.embedding import Embedding
from maml.learners.protonet import prototypes, squared_distances
from maml.metagradient.problem import Problem
from maml.params import Params

COMPONENTS = {
    "finetune": {
        "attribute": "Finetune",
        "help": "a classifier of all training classes, then nearest centroid or a tuned head",
        "reads": ("train_ways", "batch_size", "inner_lr", "eval_inner_steps", "inner_optimizer",
                  "shots", "eval_queries"),
        "refuses": {
            "kernels": {"native": "has no inner loop to learn through"},
            "meta_gradient": {"mixed": "has no inner loop to learn through"},
        },
    }
}  # fmt: skip

HEAD = "head."


class Finetune(Embedding):
    """An ordinary classifier of the training classes, whose features serve new classes.

    Training is supervised: a task is a mini-batch of ``--batch-size`` images of all classes of the
    training split, which ``--train-ways`` counts. At test the features stand still. Without inner
    steps (``--eval-inner-steps 0``, or `python -m maml.evaluate RUN_DIR --steps 0`) a query has the
    class of the nearest centroid of the support set; with them a linear head, which begins at zero,
    descends the cross-entropy of the support set.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.train_ways is None:
            raise UserError(
                f"--learner {config.learner}: --train-ways must say how many classes the training "
                "split has"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            dtype = getattr(torch, config.dtype)
            self.classifier = nn.Linear(self.n_features, config.train_ways, dtype=dtype)
        nn.init.zeros_(self.classifier.bias)

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Episodes:
        """Return mini-batches of the training classes to learn from, or few-shot tasks."""
        if evaluation:
            return super().open_tasks(split, evaluation=True)
        config = self.config
        found = super().open_tasks(split, evaluation=True)
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
        return Batches(
            examples, split=split, batch_size=config.batch_size, seed=config.seed, dtype=found.dtype
        )

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """The classifier's loss of a mini-batch, by weights that all tasks share."""
        return super().problem(meta_params, 0)

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of a mini-batch over the training classes, and logits."""
        features, _ = self.call_network(params, task.query_x)
        logits = features @ params["classifier.weight"].T + params["classifier.bias"]
        return self.objective.loss(logits, task.query_y), logits

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """As it is evaluated: a linear head that adapts, on features that stand still."""
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
            lr=self.config.inner_lr,
            steps=steps,
        )

    def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the support set by the head, and logits."""
        features, _ = self.call_network(params, task.support_x)
        logits = _linear(params, features)
        return self.objective.loss(logits, task.support_y), logits

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        """See `Learner.answers`: the support set is always normalised by itself."""
        support, statistics = self.call_network(params, task.support_x)
        one_hot = self._one_hot(task, self.config.ways, support)
        transductive, _ = self.call_network(params, task.query_x)
        alone, _ = self.call_network(params, task.query_x, statistics)
        both = [self.logits(params, support, one_hot, query) for query in (transductive, alone)]
        return both[0], both[1]

    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Return the head's logits, or minus the squared distances to the centroids."""
        if f"{HEAD}weight" in params:
            return _linear(params, query)
        return -squared_distances(query, prototypes(support, one_hot))


def _linear(params: Params, features: Tensor) -> Tensor:
    return features @ params[f"{HEAD}weight"].T + params[f"{HEAD}bias"]
