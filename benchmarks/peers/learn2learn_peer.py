"""learn2learn's MAML as its examples use it: clone, adapt, backward, one task after another."""

from __future__ import annotations

import warnings

from benchmarks.network import gradients_of, loss_function, peer_network
from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner
from maml.params import Params


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import learn2learn

    network, names = peer_network(learner)
    config = learner.config
    loss = loss_function(config)
    maml = learn2learn.algorithms.MAML(network, lr=config.inner_lr, first_order=False)

    def repetition() -> Params:
        network.zero_grad()
        for i in range(len(tasks.support_x)):
            clone = maml.clone()
            for _ in range(config.inner_steps):
                clone.adapt(loss(clone(tasks.support_x[i]), tasks.support_y[i]))
            loss(clone(tasks.query_x[i]), tasks.query_y[i]).backward()
        return gradients_of(network, names)

    return repetition
