"""higher's MAML example: a functional model and a differentiable SGD, one task after another."""

from __future__ import annotations

import warnings

import torch

from benchmarks.network import gradients_of, loss_function, peer_network
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner
from maml.params import Params


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import higher

    network, names = peer_network(learner)
    config = learner.config
    loss = loss_function(config)
    optimizer = torch.optim.SGD(network.parameters(), lr=config.inner_lr)

    def repetition() -> Params:
        network.zero_grad()
        for i in range(len(tasks.support_x)):
            context = higher.innerloop_ctx(network, optimizer, copy_initial_weights=False)
            with context as (functional, inner):
                for _ in range(config.inner_steps):
                    inner.step(loss(functional(tasks.support_x[i]), tasks.support_y[i]))
                loss(functional(tasks.query_x[i]), tasks.query_y[i]).backward()
        return gradients_of(network, names)

    return repetition
