"""higher's MAML example: a functional model and a differentiable SGD, one task after another."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from benchmarks.network import loss_function, peer_network, task_by_task
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import higher

    network, names = peer_network(learner)
    config = learner.config
    loss = loss_function(config)
    optimizer = torch.optim.SGD(network.parameters(), lr=config.inner_lr)

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        context = higher.innerloop_ctx(network, optimizer, copy_initial_weights=False)
        with context as (functional, inner):
            for _ in range(config.inner_steps):
                inner.step(loss(functional(support_x), support_y))
            loss(functional(query_x), query_y).backward()

    return task_by_task(network, names, tasks, backward)
