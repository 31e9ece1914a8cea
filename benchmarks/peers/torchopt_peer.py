"""TorchOpt's MAML example: MetaSGD with the state extracted and recovered, task by task."""

from __future__ import annotations

import torchopt

from benchmarks.network import gradients_of, loss_function, peer_network
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner
from maml.params import Params


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    network, names = peer_network(learner)
    parameters = dict(network.named_parameters())
    config = learner.config
    loss = loss_function(config)
    inner = torchopt.MetaSGD(network, lr=config.inner_lr)

    def repetition() -> Params:
        for parameter in parameters.values():
            parameter.grad = None
        network_start = torchopt.extract_state_dict(network, by="reference")
        inner_start = torchopt.extract_state_dict(inner, by="reference")
        for i in range(len(tasks.support_x)):
            for _ in range(config.inner_steps):
                inner.step(loss(network(tasks.support_x[i]), tasks.support_y[i]))
            loss(network(tasks.query_x[i]), tasks.query_y[i]).backward()
            torchopt.recover_state_dict(network, network_start)
            torchopt.recover_state_dict(inner, inner_start)
        return gradients_of(network, names)

    return repetition
