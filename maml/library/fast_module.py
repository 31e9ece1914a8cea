"""A module after its adaptation to one task."""

import contextlib
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.generators import kept
from datasets.tasks import Task
from maml.errors import UserError
from maml.execution.trial import Trial
from maml.learners import Learner
from maml.library.inputs import called_with, explained
from maml.networks.calls import alone_with
from maml.networks.ordinary import own_name, switched, tensors
from maml.networks.statistics import OneValueError, Statistics
from maml.params import Params, of_kind

BatchStatistics = Literal["query", "support"]
"""The set whose mean and variance normalise the queries. support: the support set, so an answer
depends on no other query (non-transductive). query: all queries of the call together, as in MAML's
released code (transductive)."""


class FastModule(nn.Module):
    """A module that answers queries with weights that have adapted to a support set.

    Attributes:
        params: ``{name: […]}``, by the learner's names. They are no ``nn.Parameter``: if gradients
            were enabled, they are functions of the meta-parameters.
    """

    _learner: Learner

    def __init__(self, learner: Learner, params: Params, support: Task) -> None:
        """Hold ``params`` that have adapted to the task ``support``. We do not read its queries."""
        super().__init__()
        known = tensors(learner.network)
        self.params = {n: of_kind(t, known[n]) if n in known else t for n, t in params.items()}
        self._support = support
        # Not by nn.Module's setter, which would register the learner's parameters as this module's.
        self.__dict__["_learner"] = learner

    def forward(
        self, *inputs: Any, batch_statistics: BatchStatistics = "query", **named: Any
    ) -> Tensor:
        """Return the outputs for queries ``[E, …]``; call it as the module, or with a task's input.

        With "query", batch norms use the queries' statistics, as the outer loss does. With
        "support", they use the support set's, so no answer depends on another query. This word may
        also be the last of ``inputs``.
        """
        if len(inputs) > 1 and isinstance(inputs[-1], str):  # no input is a word
            *inputs, batch_statistics = inputs  # type: ignore[assignment]
        if batch_statistics not in get_args(BatchStatistics):
            raise UserError(f"batch_statistics {batch_statistics!r}: query or support")
        learner, network = self._learner, self._learner.network
        x = called_with(network, inputs, named)
        explains = explained([self._support._replace(query_x=x)], next(iter(self.params.values())))
        with alone_with(network), switched(learner, training=self.training), explains:
            if not learner.inherits("answers"):
                # `answers` does not read the queries' targets, so empty targets are enough.
                empty = pytree.tree_map(lambda part: part[:0], self._support.support_y)
                task = self._support._replace(query_x=x, query_y=empty)
                answers = learner.answers(self.params, task)[batch_statistics == "support"]
                if answers is None:
                    raise OneValueError(pytree.tree_leaves(x)[0].shape)
                return answers
            statistics: Statistics = ()
            if batch_statistics == "support":
                _, statistics = learner.call_network(self.params, self._support.support_x)
            return learner.call_network(self.params, x, statistics or None)[0]

    def features(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the features ``[E, F]``, the output layer's input, of examples ``[E, …]``.

        Batch norms use the statistics of these examples, so give many at once.

        Raises:
            UserError: if the network has no separate output layer.
        """
        learner, network = self._learner, self._learner.network
        with alone_with(network), switched(learner, training=self.training):
            return learner.features_of(self.params, called_with(network, inputs, named))[0]

    def extra_repr(self) -> str:
        """Return what `print` shows: the network."""
        network = self._learner.network
        return repr(getattr(network, "module", network))

    def __deepcopy__(self, memo: Any) -> "FastModule":
        """Return a copy with weights of its own, which are functions of nothing."""
        params = {name: tensor.detach().clone() for name, tensor in self.params.items()}
        return FastModule(self._learner, params, self._support).train(self.training)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Give ``state_dict`` the network's state, by the names that the network's author gave.

        Load it with ``network.load_state_dict(state, strict=False)``. Running statistics are
        missing, so call the network in training mode, where it normalises by the batch. The output
        layer is missing if the learner has none.
        """
        network, params = self._learner.network, self._learner.modulated(self.params)
        buffers = dict(network.named_buffers())
        found = {name: buffers[name] for name in network.state_dict() if name in buffers} | params
        for name in tensors(network):
            if name in found:
                tensor = found[name] if keep_vars else found[name].detach()
                destination[prefix + own_name(network, name)] = tensor


def adapted(learner: Learner, meta_params: Params, support: Task, steps: int) -> FastModule:
    """Adapt to a support set ``[E, …]``. The result is differentiable if gradients are enabled."""
    support = pytree.tree_map(torch.clone, support)  # the caller may use its memory again
    if torch.is_grad_enabled():
        return FastModule(learner, learner.adapted(meta_params, support, steps), support)
    alone = pytree.tree_map(lambda part: part[None], support)
    problem, at = learner.adapt(meta_params, alone, steps)
    found = problem.params({name: tensor[0] for name, tensor in at.items()}, problem.last_step)
    # Clones, because parameters that do not adapt share the learner's memory.
    return FastModule(learner, {name: t.clone() for name, t in found.items()}, support)


def unadapted(learner: Learner, meta_params: Params) -> FastModule:
    """Return the network as it is at the beginning of the inner loop."""
    nothing = Task(*[torch.empty(0)] * 4)
    return FastModule(learner, learner.adapted(meta_params, nothing, 0), nothing)


def first_outputs(learner: Learner, x: Any) -> Any:
    """Return the outputs for ``x [E, …]`` before any adaptation, without dropout."""
    network = learner.network
    with (
        alone_with(network),
        Trial(network),
        switched(learner, training=False),
        kept(),
        torch.enable_grad(),
    ):
        params = unadapted(learner, learner.meta_parameters()).params
        with contextlib.suppress(OneValueError):
            return learner.call_network(params, pytree.tree_map(torch.clone, x))[0]
        # One example has no statistics, but its outputs have the form of any other's.
        _, of_two = learner.call_network(params, pytree.tree_map(lambda p: torch.cat([p, p]), x))
        return learner.call_network(params, pytree.tree_map(torch.clone, x), of_two)[0]
