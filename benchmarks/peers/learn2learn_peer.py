"""learn2learn's MAML as its examples use it: clone, adapt, backward, one task after another."""

from __future__ import annotations

import warnings

from torch import Tensor

from benchmarks.network import loss_function, peer_network, task_by_task
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import learn2learn

    network, names = peer_network(learner)
    config = learner.config
    loss = loss_function(config)
    maml = learn2learn.algorithms.MAML(network, lr=config.inner_lr, first_order=False)

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        clone = maml.clone()
        for _ in range(config.inner_steps):
            clone.adapt(loss(clone(support_x), support_y))
        loss(clone(query_x), query_y).backward()

    return task_by_task(network, names, tasks, backward)
