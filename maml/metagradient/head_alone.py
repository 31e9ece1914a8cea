"""An inner loop that moves the output layer alone (ANIL), on features that are computed once.

The rest of the network stands still, so it gives the output layer the same features f at every
step. The loop and its derivative are those of a linear layer on f. They end in the gradient by f,
and one way back through the network turns that into the gradient by its weights, however many steps
there were. It is the number that every other way gives.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.kernels.convnet import ALL, ConvNetFeatures, Point
from maml.kernels.derivatives import of_each_task
from maml.metagradient import unrolled
from maml.metagradient.problem import Outer, Problem
from maml.networks.conv4 import Conv4
from maml.networks.headless import Head
from maml.networks.loss import NetworkLoss, apply
from maml.params import Params


def moves_head_alone(problem: Problem) -> bool:
    """Say whether a problem that compiled kernels serve moves its network's output layer alone."""
    support, query = problem.support, problem.query
    if not (isinstance(support, NetworkLoss) and isinstance(query, NetworkLoss)):
        return False
    # A part of a set has statistics, and so features, of its own.
    if not problem.steps or problem.displacement or support.batches is not None:
        return False
    moving = {*problem.start, *(name for of in problem.step_params[:1] for name in of)}
    assert isinstance(query.network, Conv4)
    return all(name.startswith(query.network.head_prefix) for name in moving)


class HeadAlone:
    """The inner loops of one problem, for which `moves_head_alone`.

    Kernels compute features and the way back from them; torch the loop.
    """

    def __init__(self, problem: Problem) -> None:
        support, query = problem.support, problem.query
        assert isinstance(support, NetworkLoss)
        assert isinstance(query, NetworkLoss)
        assert isinstance(query.network, Conv4)
        self._convnet, head = ConvNetFeatures(query.network), Head(query.network)
        prefix = query.network.head_prefix
        body = {n: t for n, t in problem.fixed.items() if not n.startswith(prefix)}
        with torch.no_grad():
            self._body = self._convnet.enter(body)
        self._of_features = dataclasses.replace(
            problem,
            support=dataclasses.replace(support, network=head),
            query=dataclasses.replace(query, network=head),
            fixed={name: t for name, t in problem.fixed.items() if name not in body},
        )
        self._head, self._names = head, list(problem.fixed)

    @torch.no_grad()
    def differentiate(self, tasks: Task) -> Outer:
        """Differentiate the outer loss of B tasks by the problem's tensors."""
        body = of_each_task(self._body, len(tasks.query_y))
        query, at_query = self._convnet.features(body, tasks.query_x)
        points, inputs = [at_query], [query.requires_grad_()]
        if self._of_features.order == "second":
            support, at_support = self._convnet.features(body, tasks.support_x)
            points, inputs = [*points, at_support], [*inputs, support.requires_grad_()]
        else:  # the inner gradients are constants, whatever the features
            support, _ = self._convnet.outputs(body, tasks.support_x)
        of_features = tasks._replace(support_x=support, query_x=query)
        outer, cotangents = unrolled.by_inputs(self._of_features, of_features, inputs)
        by_body = sum(map(self._pulled_back, points, cotangents))
        assert isinstance(by_body, Tensor)
        fixed = outer.gradients.fixed | self._convnet.leave({ALL: by_body})
        gradients = outer.gradients._replace(fixed={name: fixed[name] for name in self._names})
        return outer._replace(gradients=gradients)

    def _pulled_back(self, point: Point, cotangent: Tensor | None) -> Tensor:
        """Return the gradient by the kernels' weights, ``[P]``, summed over tasks."""
        assert cotangent is not None
        return self._convnet.pull_back(point, cotangent)[ALL].sum(0)

    @torch.no_grad()
    def adapt(self, tasks: Task) -> Params:
        """Return what adapts after all inner steps, ``{name: [B, …]}``."""
        body = of_each_task(self._body, len(tasks.support_y))
        support, _ = self._convnet.outputs(body, tasks.support_x)
        of_features = tasks._replace(support_x=support)
        return torch.func.vmap(lambda task: unrolled.adapt(self._of_features, task))(of_features)

    @torch.no_grad()
    def answers(self, at: Params, tasks: Task) -> tuple[Tensor, Tensor]:
        """See `maml.kernels.derivatives.Native.answers`; ``at`` is what adapts alone."""
        body = of_each_task(self._body, len(tasks.query_y))
        together, _ = self._convnet.outputs(body, tasks.query_x)
        _, of_support = self._convnet.outputs(body, tasks.support_x)
        apart, _ = self._convnet.outputs(body, tasks.query_x, of_support)

        def logits(at: Params, features: Tensor) -> Tensor:
            own = self._of_features.params(at, self._of_features.last_step)
            return apply(self._head, own, features)[0]

        of_each = torch.func.vmap(logits)
        return of_each(at, together), of_each(at, apart)
