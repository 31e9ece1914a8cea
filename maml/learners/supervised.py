"""Supervised learning: ordinary classification. A task is a mini-batch without an inner loop.

So the strategies, logs and checkpoints of meta-learners serve a classifier, too.
"""

from datasets import open_batches
from datasets.batches import Batches
from maml.config import Config
from maml.learners.data import data_options
from maml.learners.noadapt import NoAdaptation
from maml.learners.objectives import RANKED_CLASSIFICATION

COMPONENTS = {
    "supervised": {
        "attribute": "Supervised",
        "adapts_at_test": False,
        "help": "ordinary classification: a task is a mini-batch, without an inner loop",
        "tasks": "batches",
        "reads": ("batch_size", "epochs"),
        "refuses": {
            "kernels": {"native": "has no inner loop"},
            "meta_gradient": {"mixed": "has no inner loop"},
        },
    }
}


class Supervised(NoAdaptation):
    """Learn one set of weights by the loss of the query set, which is a mini-batch."""

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
            **data_options(config),
        )
