"""A module as it has adapted to one task."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from datasets.tasks import Task
from maml.errors import UserError
from maml.learners import Learner
from maml.metagradient import unrolled
from maml.networks.ordinary import own_name, switched, tensors
from maml.networks.statistics import Statistics
from maml.params import Params

BatchStatistics = Literal["query", "support"]
"""Whose mean and variance normalise the queries inside the network. support: the support set's, so
that one query's answer depends on no other (non-transductive). query: those of all queries that are
asked together, as in MAML's released code (transductive)."""


class FastModule(nn.Module):
    """Answers queries with the weights that a support set has made.

    Attributes:
        params: ``{name: […]}``, by the learner's names. They are no parameters: where gradients
            were enabled, they are functions of the meta-parameters.
    """

    def __init__(self, learner: Learner, params: Params, support: Task) -> None:
        """Take what `adapted` has returned for ``support``, one task whose queries nobody reads."""
        super().__init__()
        # In a tuple: its parameters are none of this module's.
        self.params, self._learner, self._support = params, (learner,), support

    def forward(self, x: Tensor, batch_statistics: BatchStatistics = "query") -> Tensor:
        """Return the outputs for queries ``x [E, …]``.

        Batch norms normalise by the queries, as the outer loss does; or, so that no answer depends
        on another query, by the statistics of the "support" set.
        """
        if batch_statistics not in get_args(BatchStatistics):
            raise UserError(f"batch_statistics {batch_statistics!r}: query or support")
        (learner,) = self._learner
        with switched(learner.network, training=self.training):
            if type(learner).answers is not Learner.answers:
                # No learner's answer reads the queries' targets.
                task = self._support._replace(query_x=x, query_y=self._support.support_y[:0])
                return learner.answers(self.params, task)[batch_statistics == "support"]
            statistics: Statistics = ()
            if batch_statistics == "support":
                _, statistics = learner.call_network(self.params, self._support.support_x)
            return learner.call_network(self.params, x, statistics or None)[0]

    def features(self, x: Tensor) -> Tensor:
        """Return what the output layer sees of examples ``x [E, …]``: ``[E, F]``.

        A network that normalises does so by their own statistics: give many at once.

        Raises:
            UserError: if the network has no output layer apart.
        """
        (learner,) = self._learner
        with switched(learner.network, training=self.training):
            return learner.features_of(self.params, x)[0]

    def network_state(self) -> Params:
        """Return copies, on the CPU, of the network's state by the names that its author gave.

        ``network.load_state_dict(state, strict=False)`` takes them. Not strictly: there are no
        running statistics (so call it in training mode, where it normalises by the batch), and no
        output layer where the learner has none.
        """
        (learner,) = self._learner
        network, params = learner.network, learner.modulated(self.params)
        buffers = dict(network.named_buffers())
        saved = {name: buffers[name] for name in network.state_dict() if name in buffers}
        return {
            own_name(network, name): (saved | params)[name].detach().cpu().clone()
            for name in tensors(network)
            if name in params or name in saved
        }


def adapted(learner: Learner, meta_params: Params, support: Task, steps: int) -> FastModule:
    """Adapt to a support set, ``[E, …]``; differentiably, where gradients are enabled."""
    if torch.is_grad_enabled():
        problem = learner.problem(meta_params, steps)
        found = unrolled.adapt(problem, support, unrolled.by_autograd)
    else:
        problem, at = learner.adapt(meta_params, Task(*(part[None] for part in support)), steps)
        found = {name: tensor[0] for name, tensor in at.items()}
    params = problem.params(found, problem.last_step)
    if not torch.is_grad_enabled():  # what stands still is the learner's own memory
        params = {name: tensor.clone() for name, tensor in params.items()}
    return FastModule(learner, params, support)


def unadapted(learner: Learner, meta_params: Params) -> FastModule:
    """Return the network as the inner loop begins with it."""
    problem = learner.problem(meta_params, 0)
    params = problem.params(problem.start, problem.last_step)
    return FastModule(learner, params, Task(*[torch.empty(0)] * 4))
