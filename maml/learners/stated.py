"""What a learner states: one task's inner problem and outer loss, and how it answers queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from datasets.episodes import Episodes
from datasets.opening import Contents
from datasets.spelling import is_theirs
from datasets.tasks import Task
from maml.config import Config
from maml.learners.adapting import frozen
from maml.learners.data import data_contents, few_shot_tasks, network_of
from maml.learners.objectives import REGRESSION, Given, objective
from maml.metagradient.by_task import Batching
from maml.metagradient.problem import Problem, called
from maml.networks import serving
from maml.networks.headless import given_to_head
from maml.networks.loss import NetworkLoss, apply
from maml.networks.norms import tensors
from maml.networks.statistics import Statistics
from maml.params import Params, without_prefix


class Stated(nn.Module, ABC):
    """The part of a `maml.learners.base.Learner` that its author writes, for *one* task, and pure.

    A subclass states its inner problem in `problem`, and may override any of `support_loss`,
    `query_loss`, `set_loss`, `loss`, `call_network` and `answers`: whatever they are is what is
    differentiated. Evaluation adapts by them, too, and scores the `answers`.

    Attributes:
        metric_names: The metrics that `metrics` returns, in order; some names are taken
            (`maml.learners.metric_names`).
        objective: What answers are scored by: a loss, and metrics.
        criterion: What `loss` is, unless a subclass overrides that: the objective's, or another
            function of outputs and targets to train with.
        batching: How B tasks are computed where no kernels serve: all at once by "vmap", or one by
            one ("tasks"), which is right for any network and loss.
        draws: Whether its losses draw random numbers, as dropout does (`maml.metagradient.draws`).
        contents: What the data set holds (`datasets.opening.Contents`).
        image_shape: (C, H, W) of the images that the network takes; None where it takes none.
        frozen: The network's names of what neither adapts nor learns (`maml.learners.adapting`).
    """

    any_ways: ClassVar[bool] = False
    """Whether the same meta-parameters tell any number of classes apart, as no parameter is of a
    class. Then a trained model may be tested at other ways than the run's."""
    any_outputs: ClassVar[bool] = False
    """Whether a user's network may have any number of outputs, as features are what counts."""

    def __init__(self, config: Config, given: Given | None = None) -> None:
        """Make the learner that the configuration names.

        Args:
            config: The configuration, of which a learner reads its own flags.
            given: A network at hand, in place of the one that the configuration names.
        """
        super().__init__()
        self.config = config
        theirs = is_theirs(config.learner) or is_theirs(config.network)
        self.batching: Batching = "tasks" if theirs else "vmap"
        if config.batching != "auto":
            self.batching = config.batching
        self.draws, self.checked = False, set[int]()
        if given is not None:
            self.network, self.objective = given
            self.contents = Contents(None, classifies=self.objective is not REGRESSION)
        else:
            self.contents = data_contents(config)
            self.objective = objective(self.contents.classifies)
            any_outputs = self.any_outputs or not self._is_own("loss")
            outputs = self.outputs(config)
            self.network = network_of(config, self.contents, outputs, any_outputs=any_outputs)
        self.criterion = self.objective.loss
        self.metric_names = self.objective.names
        self.image_shape = self.contents.image_shape
        self.frozen = frozen(
            config.freeze, self.network, f"--freeze {config.freeze} with --network {config.network}"
        )
        serving.allow_kernels(self.network, config.kernels != "torch")
        self.to(getattr(torch, config.dtype))

    def outputs(self, config: Config) -> int:
        """Return how many outputs a classifier's network has."""
        return config.ways

    @abstractmethod
    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the inner problem of every task, and its outer loss.

        Args:
            meta_params: ``{name: […]}``; the problem's tensors may be any differentiable function
                of them.
            steps: Inner-loop steps: ``--inner-steps`` in training, else as many as asked for.
        """

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """Return the inner problem as it is trained on; by default as it is evaluated.

        Args:
            meta_params: As in `problem`.
            phase: What `phase` says of the iteration that the tasks are of.
        """
        return self.problem(meta_params, self.config.inner_steps)

    def phase(self, iteration: int) -> int:
        """Return what of an iteration, from 0, the training problem depends on; by default nothing.

        An iteration's tasks know it by their ids, so the same tasks have the same problem whoever
        computes them, and when.
        """
        return 0

    @property
    def last_phase(self) -> int:
        """The phase that a long training ends in, after which the problem changes no more."""
        return 0

    def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss that the inner loop descends (a scalar), and outputs.

        Args:
            params: The network's weights, by its own names, and whatever else `problem` has.
            task: One task.
            step: The inner step, from 0.
        """
        return called(self.set_loss, params, task.support_x, task.support_y)

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the outer loss (a scalar) after inner step ``step``, and outputs for `metrics`."""
        return called(self.set_loss, params, task.query_x, task.query_y)

    def set_loss(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a set, normalised by its own statistics, and its outputs."""
        outputs, _ = self.call_network(params, x)
        return self.loss(outputs, y), outputs

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss (a scalar) of outputs ``[E, …]`` for targets ``y [E, …]``.

        It is the data set's own: cross-entropy of classes, or else the mean squared error. A
        subclass that overrides it may have a network with any outputs, for any targets.
        """
        return self.criterion(outputs, y)

    def call_network(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Apply the network with ``params`` (names without prefix) to ``x [E, …]``."""
        at = self.modulated(params)
        own = {name: at[name] for name in tensors(self.network) if name in at}
        return apply(self.network, own, x, statistics)

    def features_of(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Return what the output layer is given for ``x``, ``[E, F]``, and the statistics used.

        ``params`` and ``statistics`` are as in `call_network`.

        Raises:
            UserError: if the network does not say which its output layer is, or does not call it
                once.
        """
        given, (_, used) = given_to_head(
            self.network, self.config.network, lambda: self.call_network(params, x, statistics)
        )
        return given, used

    def modulated(self, params: Params) -> Params:
        """Return the network's weights as it is called with them (CAVIA's context moves some)."""
        return params

    def answers(self, params: Params, task: Task) -> tuple[Tensor, Tensor]:
        """Return one task's outputs for its queries, by adapted ``params``: see `Predictions`."""
        transductive, own = self.call_network(params, task.query_x)
        if not own:  # nothing is normalised, and both are the same
            return transductive, transductive
        _, of_support = self.call_network(params, task.support_x)
        return transductive, self.call_network(params, task.query_x, of_support)[0]

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return ``{name: […]}`` of outputs ``[…, E, …]`` for targets ``y [… E, …]``."""
        return self.objective.metrics(outputs, y)

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Episodes:
        """Return the tasks of ``split`` that it learns from, or is evaluated on: few-shot ones.

        Raises:
            DataError: naming the flag or the file.
        """
        classes = self._is_own("loss")
        return few_shot_tasks(
            self.config, split, self.contents.form, evaluation=evaluation, classes=classes
        )

    def materialise(self, meta_params: Params, tasks: Task, steps: int | None = None) -> Any:
        """Return the tasks that the losses read; a learner that acts makes them by acting.

        Args:
            meta_params: The meta-parameters to act by.
            tasks: B tasks, as `open_tasks` has them.
            steps: Inner steps that will be taken; None: as many as in training.
        """
        return tasks

    # ---- what is of use to a subclass -----------------------------------------------------------

    def network_weights(self, meta_params: Params) -> Params:
        """Return the network's share of ``meta_params``, with names without prefix."""
        return without_prefix(meta_params, "network.")

    def stated_losses(self) -> dict[str, Any]:
        """Return the support and the query loss as `Problem` takes them.

        A loss that nobody has overridden is stated as what it is, the network's own: of that alone
        compiled kernels compute head and loss, too (`maml.metagradient.native`).
        """
        return {part: self._stated(part) for part in ("support", "query")}

    def _stated(self, part: Any) -> Any:
        if not all(map(self._is_own, (f"{part}_loss", "set_loss", "loss", "call_network"))):
            return getattr(self, f"{part}_loss")
        return NetworkLoss(self.network, part, self.criterion)

    def _is_own(self, name: str, of: type[Stated] | None = None) -> bool:
        """Say whether neither a subclass of ``of`` nor a change of this object overrides a method.

        ``of`` None is `Stated` itself.
        """
        return getattr(getattr(self, name), "__func__", None) is getattr(of or Stated, name)
