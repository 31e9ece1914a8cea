"""A plain loop of torch with ``create_graph``, one task after another."""

from __future__ import annotations

import torch
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
    start = dict(network.named_parameters())

    def loss_of(at: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.func.functional_call(network, at, (x,)), y)

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        at: dict[str, Tensor] = {**start}
        for _ in range(config.inner_steps):
            of_support = loss_of(at, support_x, support_y)
            by = torch.autograd.grad(of_support, list(at.values()), create_graph=True)
            moved = (w - config.inner_lr * g for w, g in zip(at.values(), by, strict=True))
            at = dict(zip(at, moved, strict=True))
        loss_of(at, query_x, query_y).backward()

    return task_by_task(network, names, tasks, backward)
