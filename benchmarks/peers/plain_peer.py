"""A plain loop of torch with ``create_graph``, one task after another."""

from __future__ import annotations

import torch

from benchmarks.network import gradients_of, loss_function, peer_network
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner
from maml.params import Params


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    network, names = peer_network(learner)
    config = learner.config
    loss = loss_function(config)
    start: Params = dict(network.named_parameters())

    def repetition() -> Params:
        network.zero_grad()
        for i in range(len(tasks.support_x)):
            at = start
            for _ in range(config.inner_steps):
                outputs = torch.func.functional_call(network, at, (tasks.support_x[i],))
                of_support = loss(outputs, tasks.support_y[i])
                by = torch.autograd.grad(of_support, list(at.values()), create_graph=True)
                at = {
                    name: weight - config.inner_lr * gradient
                    for (name, weight), gradient in zip(at.items(), by, strict=True)
                }
            outputs = torch.func.functional_call(network, at, (tasks.query_x[i],))
            loss(outputs, tasks.query_y[i]).backward()
        return gradients_of(network, names)

    return repetition
