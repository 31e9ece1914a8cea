"""TorchOpt's MAML example: MetaSGD with the state extracted and recovered, task by task."""

from __future__ import annotations

import torchopt
from torch import Tensor

from benchmarks.network import loss_function, peer_network, task_by_task
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    network, names = peer_network(learner)
    config = learner.config
    loss = loss_function(config)
    inner = torchopt.MetaSGD(network, lr=config.inner_lr)
    network_start = torchopt.extract_state_dict(network, by="reference")
    inner_start = torchopt.extract_state_dict(inner, by="reference")

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        for _ in range(config.inner_steps):
            inner.step(loss(network(support_x), support_y))
        loss(network(query_x), query_y).backward()
        torchopt.recover_state_dict(network, network_start)
        torchopt.recover_state_dict(inner, inner_start)

    return task_by_task(network, names, tasks, backward)
