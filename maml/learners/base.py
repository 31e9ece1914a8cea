"""The learner: a module of meta-parameters that states one task's inner problem and outer loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.components import is_theirs
from datasets.episodes import Episodes
from datasets.opening import Contents
from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.learners.adapting import frozen
from maml.learners.data import data_contents, few_shot_tasks, network_of
from maml.learners.objectives import CLASSIFICATION, REGRESSION, Given
from maml.metagradient import differentiate, draws, unrolled
from maml.metagradient.by_task import Batching, Way, each_task
from maml.metagradient.problem import Problem, called
from maml.metagradient.reading import checked_way
from maml.networks import mixing
from maml.networks.calls import alone_with, apply
from maml.networks.conv4 import allow_kernels, obstacle
from maml.networks.headless import given_to_head
from maml.networks.loss import NetworkLoss
from maml.networks.ordinary import tensors
from maml.networks.statistics import Statistics
from maml.params import Params, without_prefix
from maml.seeds import kept

MOST_CHECKED = 64
"""Sizes of tasks that are remembered: those of episodes that are acted are many."""


class Predictions(NamedTuple):
    """What a network answers to the queries of B tasks: ``[B, E, …]`` each.

    Attributes:
        transductive: Normalised by the statistics of the whole query set, as in MAML's released
            code.
        non_transductive: By those of the support set: an answer depends on no other query.
    """

    transductive: Tensor
    non_transductive: Tensor


class Adapted(NamedTuple):
    """Of B tasks: the inner problem, and what has adapted, ``{name: [B, …]}``."""

    problem: Problem
    at: Params


class Learner(nn.Module, ABC):
    """What learns: its parameters are the meta-parameters, by name, the network's as ``network.…``.

    What an author writes is for *one* task, and pure: the inner problem in `problem`, and any of
    `support_loss`, `query_loss`, `set_loss`, `loss`, `call_network` and `answers`: whatever they
    are is what is differentiated, evaluated and scored. The methods take meta-parameters as an
    argument and read none of their own.

    Attributes:
        metric_names: The metrics that `metrics` returns, in order; some names are taken
            (`maml.learners.objectives`).
        objective: What answers are scored by: a loss, and metrics.
        criterion: What `loss` is, unless a subclass overrides that: the objective's, or another.
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
        """Make the learner of a configuration, with its network or one ``given``."""
        super().__init__()
        self.config = config
        theirs = is_theirs(config.learner) or is_theirs(config.network)
        self.batching: Batching = "tasks" if theirs else "vmap"
        if config.batching != "auto":
            self.batching = config.batching
        self.draws = False
        self.checked: dict[Any, Way] = {}
        if given is not None:
            self.network, self.objective = given
            self.contents = Contents(None, classifies=self.objective is not REGRESSION)
        else:
            self.contents = data_contents(config)
            self.objective = CLASSIFICATION if self.contents.classifies else REGRESSION
            any_outputs = self.any_outputs or not self._is_own("loss")
            outputs = self.outputs(config)
            self.network = network_of(config, self.contents, outputs, any_outputs=any_outputs)
        self.criterion = self.objective.loss
        self.metric_names = self.objective.names
        self.image_shape = self.contents.image_shape
        self.frozen = frozen(
            config.freeze, self.network, f"--freeze {config.freeze} with --network {config.network}"
        )
        allow_kernels(self.network, config.kernels != "torch")
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
        """Return the inner problem as it is trained on; by default as it is evaluated."""
        return self.problem(meta_params, self.config.inner_steps)

    def phase(self, iteration: int) -> int:
        """Return what of an iteration the training problem depends on; by default nothing."""
        return 0

    @property
    def last_phase(self) -> int:
        """The phase that a long training ends in."""
        return 0

    def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss that the inner loop descends (a scalar) at ``step``, from 0, and outputs.
        ``params`` are the network's weights, by its own names, and whatever else `problem` has.
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
        """Return the loss (a scalar) of outputs ``[E, …]`` for targets ``y [E, …]``: the data set's
        own. Who overrides it may have a network with any outputs, for any targets.
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
        Raises `UserError` if the network does not say which its output layer is, or does not call
        it once.
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
        """Return the tasks of ``split`` that it learns from, or is evaluated on: few-shot ones."""
        classes = self._is_own("loss")
        return few_shot_tasks(
            self.config, split, self.contents.form, evaluation=evaluation, classes=classes
        )

    def materialise(self, meta_params: Params, tasks: Task, steps: int | None = None) -> Any:
        """Return the B tasks that the losses read; a learner that acts makes them. ``steps``: inner
        steps that will be taken; None: as many as in training.
        """
        return tasks

    # ---- of use to a subclass

    def network_weights(self, meta_params: Params) -> Params:
        """Return the network's share of ``meta_params``, with names without prefix."""
        return without_prefix(meta_params, "network.")

    def stated_losses(self) -> dict[str, Any]:
        """Return the support and the query loss as `Problem` takes them: one that nobody has
        overridden is the network's own, which compiled kernels can compute.
        """
        found: dict[str, Any] = {"support": self.support_loss, "query": self.query_loss}
        part: Any
        for part in found:
            if all(map(self._is_own, (f"{part}_loss", "set_loss", "loss", "call_network"))):
                found[part] = NetworkLoss(self.network, part, self.criterion)
        return found

    def _is_own(self, name: str, of: type[Learner] | None = None) -> bool:
        # Nobody overrides a method, in a subclass of ``of`` or in this object.
        return getattr(getattr(self, name), "__func__", None) is getattr(of or Learner, name)

    # ---- of B tasks

    def meta_parameters(self) -> Params:
        """Return the learner's own meta-parameters by name (aliases, not copies)."""
        # Not `named_parameters`: in a by-reference clone they are plain tensors. While another
        # thread calls the network, a task's tensors are in their place.
        with alone_with(self.network):
            return {
                f"{prefix}.{name}" if prefix else name: tensor
                for prefix, module in self.named_modules()
                for name, tensor in module._parameters.items()
                if tensor is not None
            }

    def outer_gradient(
        self, meta_params: Params, tasks: Task, phase: int = 0, *, checked: bool = False
    ) -> differentiate.OuterGradient:
        """Differentiate the outer loss summed over B tasks, of one phase, by the meta-parameters.
        Raises `RuntimeError` for a meta-parameter that no loss depends on: a mistake, not a zero.
        """
        way = self.config.meta_gradient
        if not checked:
            way = self.checked_way(meta_params, tasks, phase)
        found = differentiate.meta_gradient(
            lambda params: self.training_problem(params, phase),
            meta_params,
            tasks,
            way,
            self.batching,
            checked=True,
        )
        return found._replace(metrics=self._measured(found.outputs, tasks.query_y))

    def checked_way(self, meta_params: Params, tasks: Any, phase: int) -> Way:
        """Do as `reading.checked_way` does, once a phase and size of tasks.

        ``tasks`` may be a list of batches of one, of any sizes: they are looked at once a phase.
        """
        # Of a larger set, losses may read other parameters.
        leaves = [] if isinstance(tasks, list) else pytree.tree_leaves(tasks)
        key = (phase, *meta_params, *(leaf.shape[1:] for leaf in leaves))
        if key not in self.checked:
            if len(self.checked) > MOST_CHECKED:
                self.checked.clear()
            params = {n: p.detach().requires_grad_() for n, p in meta_params.items()}
            with kept(), draws.of_task(draws.NONE), torch.enable_grad():
                problem = self.training_problem(params, phase)
                self.checked[key] = checked_way(
                    problem, tasks, self.config.meta_gradient, self.frozen
                )
        return self.checked[key]

    def adapted(self, meta_params: Params, task: Task, steps: int) -> Params:
        """Return all parameters after ``steps`` inner steps on one task, by their own names."""
        problem = self.problem(meta_params, steps)
        return problem.params(unrolled.adapt(problem, task), problem.last_step)

    @torch.no_grad()
    def adapt(self, meta_params: Params, tasks: Task, steps: int) -> Adapted:
        """Adapt to each of B tasks; the learners here read the support sets alone."""
        problem = self.problem(meta_params, steps)
        return Adapted(problem, differentiate.adapt(problem, tasks, self.batching))

    @torch.no_grad()
    def predictions(self, meta_params: Params, tasks: Task, steps: int) -> Predictions:
        """Adapt to each of B tasks, and answer its queries."""
        problem, at = self.adapt(meta_params, tasks, steps)

        def answer(at: Params, task: Task) -> tuple[Tensor, Tensor]:
            return self.answers(problem.params(at, problem.last_step), task)

        return Predictions(*each_task(answer, self.batching)(at, tasks))

    @torch.no_grad()
    def scores(self, predictions: Predictions, y: Tensor) -> dict[str, Tensor]:
        """Return each task's loss and metrics, ``{name: [B]}``, of its queries' targets ``y``.

        The loss is the objective's, or the author's own `loss`, whatever else the learner was
        trained with: so that learners can be compared.

        Keys: ``loss`` and the metrics' names, and each again as ``non_transductive_<name>``.
        """
        loss = self.objective.loss if self._is_own("loss") else self.loss
        results = {}
        for prefix, outputs in zip(("", "non_transductive_"), predictions, strict=True):
            results[f"{prefix}loss"] = each_task(loss, self.batching)(outputs, y)
            for name, value in self._measured(outputs, y).items():
                results[f"{prefix}{name}"] = value
        return results

    def evaluate(self, meta_params: Params, tasks: Task) -> dict[str, Tensor]:
        """Return the `scores` of B tasks after ``--eval-inner-steps`` inner steps."""
        steps = self.config.eval_inner_steps
        return self.scores(self.predictions(meta_params, tasks, steps), tasks.query_y)

    def evaluate_together(self, models: Sequence[Params], tasks: Task) -> dict[str, Tensor]:
        """Return the `scores` of an ensemble: of its models' mean outputs; each adapts by itself.

        For a classifier, outputs are logits: their mean, not that of probabilities, is what
        MAML++'s released code takes (experiment_builder.py). A `UserError` refuses a learner that
        is not evaluated by its outputs, as one that acts.
        """
        if type(self).evaluate is not Learner.evaluate:
            name = self.config.learner
            raise UserError(f"--ensemble: --learner {name} is not evaluated by its outputs")
        steps = self.config.eval_inner_steps
        answers = [self.predictions(params, tasks, steps) for params in models]
        together = Predictions(*(torch.stack(of).mean(0) for of in zip(*answers, strict=True)))
        return self.scores(together, tasks.query_y)

    def mixes(self, x: Tensor) -> bool:
        """Say whether the network answers an example of ``x [E, …]`` by the others of its set.

        Then no answer is non-transductive (`maml.networks.mixing`); of `answers` that its author
        overrides nothing is known.
        """
        stated = type(self).answers.__module__.startswith("maml.")
        if not stated or type(self).call_network is not Learner.call_network:
            return False
        return mixing.mixes(self.network, x)

    def _measured(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.metrics(outputs, y)
        if set(found) != set(self.metric_names):
            raise UserError(
                f"--learner {self.config.learner}: metrics returns {', '.join(found) or 'nothing'}"
                f" and metric_names is {', '.join(self.metric_names) or 'empty'}: name the same"
            )
        return found

    def prepare(self, device: torch.device) -> None:
        """Hold the buffers there, and compile kernels that serve, or `UserError`."""
        self.hold_buffers(device)
        try:
            self.training_problem(self.meta_parameters(), self.last_phase)
        except ValueError as error:
            # What a learner of a user's own states does not go together.
            raise UserError(f"--learner {self.config.learner}: {error}") from error
        reason = self.obstacle(device)
        if self.config.kernels == "native" and reason is not None:
            raise UserError(f"--kernels native: {reason}")

    def hold_buffers(self, device: torch.device) -> None:
        """Move the buffers to ``device``; parameters stay: the methods take those as arguments."""
        for module in self.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def obstacle(self, device: torch.device) -> str | None:
        """Say why compiled kernels do not serve this learner on ``device``; None: they do."""
        if device.type != "cpu":
            return f"the compiled kernels run on the CPU, not on --device {device.type}"
        return obstacle(self.network)

    def in_torch(self, device: torch.device) -> bool:
        """Say whether `outer_gradient` is made of torch's operations alone, and can be compiled."""
        return self.obstacle(device) is not None
