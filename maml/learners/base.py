"""The learner: a module of meta-parameters and a pure outer loss of one task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from datasets import image_shape, open_episodes
from datasets.episodes import Episodes
from datasets.errors import DataError
from datasets.tasks import Task
from maml.config import Config
from maml.execution import precision
from maml.learners.objectives import objective
from maml.metagradient.inner import Params
from maml.networks import build_network
from maml.networks.conv4 import Statistics
from maml.seeds import seed_of


class OuterGradient(NamedTuple):
    """The outer loss of B tasks, differentiated.

    Attributes:
        gradients: Σ over tasks, ``{name: […]}``, of every meta-parameter.
        losses: ``[B]``.
        metrics: ``{name: [B]}``.
    """

    gradients: Params
    losses: Tensor
    metrics: dict[str, Tensor]


class Learner(nn.Module, ABC):
    """What learns: its parameters are the meta-parameters, by name.

    The network's weights are named ``network.…``; a subclass adds what else it learns. The
    methods take meta-parameters as an argument and read none of their own, so one learner serves
    any number of workers and steps; batch them over tasks with ``torch.func.vmap``.

    Attributes:
        metric_names: The metrics that `outer_loss` returns, in order.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.objective = objective(config.data)
        self.metric_names = self.objective.names
        # The global generator is what modules draw from; it is put back afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(config.seed, "initial weights"))
            self.network = build_network(
                config.network,
                image_shape=image_shape(
                    config.data, image_size=config.image_size, image_mode=config.image_mode
                ),
                ways=config.ways,
                filters=config.filters,
            )
        self.to(getattr(torch, config.dtype))

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Episodes:
        """Return the tasks of ``split`` that it learns from, or is evaluated on: few-shot ones.

        Raises:
            DataError: naming the flag or the file.
        """
        config = self.config
        try:
            return open_episodes(
                config.data,
                split,
                ways=config.ways,
                shots=config.shots,
                queries=config.eval_queries if evaluation else config.queries,
                seed=config.seed,
                data_root=config.data_root,
                dtype=getattr(torch, config.dtype),
                omniglot_split=config.omniglot_split,
                image_size=config.image_size,
                image_mode=config.image_mode,
                split_fractions=config.split_fractions,
            )
        except DataError as error:
            if not evaluation:
                raise
            # The sampler knows its queries, not which flag they came from.
            raise DataError(str(error).replace("--queries", "--eval-queries")) from error

    def meta_parameters(self) -> Params:
        """Return the learner's own meta-parameters by name (aliases, not copies)."""
        # Not `named_parameters`: in a by-reference clone they are plain tensors.
        return {
            f"{prefix}.{name}" if prefix else name: tensor
            for prefix, module in self.named_modules()
            for name, tensor in module._parameters.items()
            if tensor is not None
        }

    def call_network(
        self, weights: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Apply the network with ``weights`` (names without prefix) to ``x [E, …]``.

        Not for concurrent threads on one learner: ``functional_call`` swaps the module's tensors
        while it runs. Every RPC call works on the learner that came with it.
        """
        with precision.products(self.config.precision):
            outputs, used = torch.func.functional_call(self.network, weights, (x, statistics))
        # What is computed from the outputs, a loss to begin with, is not rounded.
        return outputs.to(x.dtype), used

    def network_weights(self, meta_params: Params) -> Params:
        """Return the network's share of ``meta_params``, with names without prefix."""
        prefix = "network."
        return {
            name[len(prefix) :]: tensor
            for name, tensor in meta_params.items()
            if name.startswith(prefix)
        }

    def set_loss(self, weights: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a set, normalised by its own statistics, and its outputs."""
        outputs, _ = self.call_network(weights, x)
        return self.objective.loss(outputs, y), outputs

    def query_results(self, weights: Params, task: Task) -> dict[str, Tensor]:
        """Return what `evaluate` returns, of a network with these (adapted) weights.

        Transductive: queries are normalised by the statistics of the whole query set, as in MAML's
        released code. Non-transductive: by those of the same network on the support set, so that a
        query's prediction depends on no other query.
        """
        transductive, own = self.call_network(weights, task.query_x)
        outputs = {"": transductive, "non_transductive_": transductive}
        if own:  # else nothing is normalised, and both are the same
            _, of_support = self.call_network(weights, task.support_x)
            outputs["non_transductive_"], _ = self.call_network(weights, task.query_x, of_support)
        results = {}
        for prefix, found in outputs.items():
            results[f"{prefix}loss"] = self.objective.loss(found, task.query_y)
            for name, value in self.objective.metrics(found, task.query_y).items():
                results[f"{prefix}{name}"] = value
        return results

    @abstractmethod
    def outer_loss(self, meta_params: Params, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one task's outer loss (scalar) and its metrics (scalars, no gradient)."""

    def prepare(self, device: torch.device) -> None:
        """Do what takes time once, and refuse what cannot work, before a run begins.

        Raises:
            UserError: naming the flag.
        """

    def in_torch(self, device: torch.device) -> bool:
        """Say whether `outer_gradient` is made of torch's operations alone, whatever the values.

        Such a function can be compiled, or captured as a CUDA graph (``--compile``).
        """
        return True

    @torch.enable_grad()
    def outer_gradient(self, meta_params: Params, tasks: Task) -> OuterGradient:
        """Differentiate `outer_loss` summed over B tasks; here, by reverse mode through all of it.

        Raises:
            RuntimeError: for a meta-parameter that no loss depends on: a mistake, not a zero.
        """
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in meta_params.items()}
        losses, metrics = torch.func.vmap(self.outer_loss, in_dims=(None, 0))(leaves, tasks)
        gradients = torch.autograd.grad(losses.sum(), tuple(leaves.values()))
        return OuterGradient(dict(zip(leaves, gradients, strict=True)), losses.detach(), metrics)

    @abstractmethod
    def adapted(self, meta_params: Params, task: Task, steps: int) -> Params:
        """Return the network's weights with which one task's queries are answered.

        ``steps``: of the inner loop on the support set, for a learner that has one.
        """

    def evaluate(self, meta_params: Params, task: Task) -> dict[str, Tensor]:
        """Return one task's test metrics after ``eval_inner_steps``: all, transductive and not.

        Keys: ``loss`` and the metrics' names, and each again as ``non_transductive_<name>``.
        """
        adapted = self.adapted(meta_params, task, self.config.eval_inner_steps)
        return self.query_results(adapted, task)
