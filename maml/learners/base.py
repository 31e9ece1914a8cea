"""The learner: a module of meta-parameters that states one task's inner problem and outer loss."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets.components import is_theirs
from datasets.episodes import Episodes
from datasets.generators import kept
from datasets.opening import Contents
from datasets.tasks import Task
from maml.config import Config
from maml.errors import UserError
from maml.execution.trial import Trial
from maml.learners.adapting import frozen
from maml.learners.data import data_contents, few_shot_tasks, network_of, own_objective
from maml.learners.objectives import CLASSIFICATION, REGRESSION, Given, Predictions
from maml.learners.own_parts import cast
from maml.metagradient import differentiate, draws, unrolled
from maml.metagradient.by_task import Batching, Way, each_task
from maml.metagradient.plan import Plan
from maml.metagradient.problem import Problem, called
from maml.metagradient.reading import checked_way
from maml.networks import mixing
from maml.networks.calls import alone_with, apply
from maml.networks.conv4 import allow_kernels, obstacle
from maml.networks.headless import given_to_head
from maml.networks.loss import NetworkLoss
from maml.networks.statistics import OneValueError, Statistics
from maml.params import Params, in_reals, without_prefix

PARTS_OF_A_LOSS = ("set_loss", "loss", "call_network", "modulated")
MOST_CHECKED = 64
"""Clear `Learner.checked` above this many entries, because acted episodes have many sizes."""


class Adapted(NamedTuple):
    """The inner problem of B tasks, and their adapted parameters ``at``: ``{name: [B, …]}``."""

    problem: Problem
    at: Params


class Learner(nn.Module, ABC):
    """The module that learns. Its parameters are the meta-parameters; the network's: ``network.…``.

    An author writes pure methods for *one* task: the inner problem in `problem`, and any of
    `support_loss`, `query_loss`, `set_loss`, `loss`, `call_network` and `answers`. A run
    differentiates, evaluates and scores these methods. They take meta-parameters as an argument
    and do not read the module's own parameters.

    Attributes:
        metric_names: The metrics that `metrics` returns, in order, but no reserved names.
        objective: The loss and the metrics that score the outputs.
        criterion: The function that `loss` calls: the objective's loss, or another one.
        plan: How B tasks are computed without kernels, all at once or one by one, and why.
        contents: What the data set holds (`datasets.opening.Contents`).
        image_shape: (C, H, W) of the images that the network takes; None if it takes no images.
        frozen: Names of the network's frozen parameters (`maml.learners.adapting.frozen`).
    """

    any_ways: ClassVar[bool] = False
    """True if the same meta-parameters serve any number of classes, because no parameter belongs to
    one class. Then a trained model may be tested with other ways than the run's."""
    any_outputs: ClassVar[bool] = False
    """True if a user's network may have any number of outputs, because only features count."""

    def __init__(self, config: Config, given: Given | None = None) -> None:
        """Make the learner of a configuration, with its network or one ``given``."""
        super().__init__()
        self.config = config
        theirs = is_theirs(config.learner) or is_theirs(config.network)
        asked: Batching | None = None if config.batching == "auto" else config.batching
        self.plan = Plan(asked or ("tasks" if theirs else "vmap"), shares=False)
        self.checked: dict[Any, Way] = {}
        if given is not None:
            self.network, self.objective = given.network, given.objective
            self.contents = Contents(None, classifies=self.objective is not REGRESSION)
        else:
            self.contents = data_contents(config)
            self.objective = CLASSIFICATION if self.contents.classifies else REGRESSION
            any_outputs = self.any_outputs or not self.inherits("loss")
            outputs = self.outputs(config)
            self.network = network_of(config, self.contents, outputs, any_outputs=any_outputs)
            cast(self, getattr(torch, config.dtype))  # a module that is given keeps its dtypes
            if not self.inherits("loss") and self.inherits("metrics"):
                self.objective = own_objective(self.objective, self.contents, self.network)
        self.criterion = self.objective.loss
        self.metric_names = self.objective.names
        self.image_shape = self.contents.image_shape
        self.frozen = frozen(
            config.freeze, self.network, f"--freeze {config.freeze} with --network {config.network}"
        )
        allow_kernels(self.network, config.kernels != "torch")

    @property
    def batching(self) -> Batching:
        """How B tasks are computed without kernels: all at once, or one by one."""
        return self.plan.batching

    def outputs(self, config: Config) -> int:
        """Return how many outputs a classifier's network has."""
        return config.ways

    @abstractmethod
    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the inner problem of every task, and its outer loss.

        Args:
            meta_params: ``{name: […]}``; the problem's tensors may be any differentiable function
                of them.
            steps: Number of inner steps: ``--inner-steps`` in training, else the caller's choice.
        """

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """Return the inner problem of training; by default the same as in evaluation."""
        return self.problem(meta_params, self.config.inner_steps)

    def phase(self, iteration: int) -> int:
        """Return the phase: iterations of one phase share one training problem. Default: 0."""
        return 0

    @property
    def last_phase(self) -> int:
        """The phase that a long training ends in."""
        return 0

    def support_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss of the inner loop (a scalar) at ``step``, from 0, and outputs.
        ``params``: the network's weights by their names in `network`, and the others of `problem`.
        """
        return called(self.set_loss, params, task.support_x, task.support_y)

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        """Return the outer loss (a scalar) after inner step ``step``, and outputs for `metrics`."""
        return called(self.set_loss, params, task.query_x, task.query_y)

    def set_loss(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return a set's loss and outputs. The set's own statistics normalise the set."""
        outputs, _ = self.call_network(params, x)
        return self.loss(outputs, y), outputs if isinstance(outputs, Tensor) else ()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss (a scalar) of outputs ``[E, …]`` for targets ``y [E, …]``. By default the
        data set decides. A learner that overrides this may have any outputs and any targets.
        """
        return self.criterion(outputs, y)

    def call_network(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Apply the network with ``params`` (names without prefix) to ``x [E, …]``."""
        return apply(self.network, self.modulated(params), x, statistics)

    def features_of(
        self, params: Params, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Return the output layer's input for ``x``, ``[E, F]``, and the statistics used.
        Raise `UserError` if the network does not declare its output layer, or does not call the
        output layer exactly once.
        """
        given, (_, used) = given_to_head(
            self.network, self.config.network, lambda: self.call_network(params, x, statistics)
        )
        return given, used

    def modulated(self, params: Params) -> Params:
        """Return the weights to call the network with (CAVIA's context changes some of them)."""
        return params

    def answers(self, params: Params, task: Task) -> tuple[Tensor | None, Tensor]:
        """Return one task's outputs for its queries, by adapted ``params``: see `Predictions`."""
        transductive: Tensor | None = None
        with contextlib.suppress(OneValueError):
            transductive, own = self.call_network(params, task.query_x)
            if not own:  # nothing is normalised, so both are the same
                return transductive, transductive
        _, of_support = self.call_network(params, task.support_x)
        return transductive, self.call_network(params, task.query_x, of_support)[0]

    def metrics(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return ``{name: […]}`` of outputs ``[…, E, …]`` for targets ``y [… E, …]``."""
        return self.objective.metrics(outputs, y)

    def open_tasks(self, split: str, *, evaluation: bool = False) -> Episodes:
        """Return the tasks of ``split`` to learn from, or for an ``evaluation``: few-shot tasks."""
        form, classes = self.contents.form, self.inherits("loss")
        return few_shot_tasks(self.config, split, form, evaluation=evaluation, classes=classes)

    def materialise(self, meta_params: Params, tasks: Task, phase: int | None = None) -> Any:
        """Return the B tasks that the losses read. A learner that acts plays them here, as the
        `training_problem` of ``phase`` states; None: as for ``--eval-inner-steps``.
        """
        return tasks

    # ---- for subclasses

    def network_weights(self, meta_params: Params) -> Params:
        """Return the network's part of ``meta_params``, without the prefix ``network.``."""
        return without_prefix(meta_params, "network.")

    def stated_losses(self) -> dict[str, Any]:
        """Return the support and the query loss as `Problem` takes them. A loss that is not
        overridden becomes a `NetworkLoss`, because compiled kernels can compute a `NetworkLoss`.
        """
        found: dict[str, Any] = {"support": self.support_loss, "query": self.query_loss}
        part: Any
        for part in found:
            if all(map(self.inherits, (f"{part}_loss", *PARTS_OF_A_LOSS))):
                found[part] = NetworkLoss(self.network, part, self.criterion)
        return found

    def inherits(self, name: str, of: type[Learner] | None = None) -> bool:
        """Return whether neither a subclass of ``of`` nor this object overrides a method."""
        return getattr(getattr(self, name), "__func__", None) is getattr(of or Learner, name)

    # ---- for B tasks

    def meta_parameters(self) -> Params:
        """Return the learner's own meta-parameters by name (aliases, not copies), `in_reals`."""
        # Not `named_parameters`: in a by-reference clone, parameters are plain tensors. The lock:
        # a call of the network in another thread replaces them by a task's tensors for a while.
        with alone_with(self.network):
            return {
                f"{prefix}.{name}" if prefix else name: in_reals(tensor)
                for prefix, module in self.named_modules()
                for name, tensor in module._parameters.items()
                if tensor is not None
            }

    def outer_gradient(
        self, meta_params: Params, tasks: Task, phase: int = 0, *, checked: bool = False
    ) -> differentiate.OuterGradient:
        """Differentiate one phase's outer loss, summed over B tasks, by the meta-parameters. Raise
        `RuntimeError` if no loss depends on a meta-parameter: this is a mistake, no zero gradient.
        """
        way = self.config.meta_gradient
        if not checked:
            way = self.checked_way(meta_params, tasks, phase)
        state = functools.partial(self.training_problem, phase=phase)
        found = differentiate.meta_gradient(
            state, meta_params, tasks, way, self.batching, checked=True
        )
        return found._replace(metrics=self._measured(found.outputs, tasks.query_y))

    @torch.enable_grad()
    def checked_way(
        self, meta_params: Params, tasks: Any, phase: int, look: Callable[[], None] = lambda: None
    ) -> Way:
        """Call `reading.checked_way` once for each phase and size of tasks (a list: each phase).
        ``look`` is called before what the losses have written is put back.
        """
        # With the sizes, because losses may read other parameters for a larger set.
        leaves = [] if isinstance(tasks, list) else pytree.tree_leaves(tasks)
        key = (phase, self.network.training, *meta_params, *(leaf.shape[1:] for leaf in leaves))
        if key not in self.checked:
            if len(self.checked) > MOST_CHECKED:
                self.checked.clear()
            params = {n: p.detach().requires_grad_() for n, p in meta_params.items()}
            way = self.config.meta_gradient
            with draws.alone(), kept(), draws.of_task(draws.NONE), alone_with(self.network):
                problem = self.training_problem(params, phase)
                with Trial(self.network, self.criterion):
                    self.checked[key] = checked_way(problem, tasks, way, self.frozen)
                    look()
        return self.checked[key]

    def adapted(self, meta_params: Params, task: Task, steps: int) -> Params:
        """Return all parameters after ``steps`` inner steps on one task, by their own names.
        Autograd can differentiate them by the meta-parameters.
        """
        with draws.at("problem", 0):
            problem = self.problem(meta_params, steps)
        found = unrolled.adapt(problem, task, unrolled.by_autograd)
        return problem.params(found, problem.last_step)

    @torch.no_grad()
    def adapt(self, meta_params: Params, tasks: Task, steps: int) -> Adapted:
        """Adapt to each of B tasks. This project's learners read only the support sets."""
        with draws.at("problem", 0):
            problem = self.problem(meta_params, steps)
        return Adapted(problem, differentiate.adapt(problem, tasks, self.batching))

    @torch.no_grad()
    def predictions(self, meta_params: Params, tasks: Task, steps: int) -> Predictions:
        """Adapt to each of B tasks, and return the outputs for its queries."""
        problem, at = self.adapt(meta_params, tasks, steps)

        def answer(at: Params, task: Task) -> dict[str, Tensor]:
            by_queries, alone = self.answers(problem.params(at, problem.last_step), task)
            if by_queries is alone:
                return {"transductive": alone}
            found = {"transductive": by_queries, "non_transductive": alone}
            return {name: outputs for name, outputs in found.items() if outputs is not None}

        found = each_task(answer, self.batching)(at, tasks)
        by_queries = found.get("transductive")
        return Predictions(by_queries, found.get("non_transductive", by_queries))

    @torch.no_grad()
    def scores(self, predictions: Predictions, y: Tensor) -> dict[str, Tensor]:
        """Return each task's loss and metrics for the query targets ``y``: ``{name: [B]}``.

        The loss is the objective's, or the author's own `loss`. It can differ from the training
        loss (label smoothing), so that learners can be compared.

        Keys: ``loss`` and the metrics' names, and each again as ``non_transductive_<name>``: the
        same object where nothing is normalised, and alone where a single query is.
        """
        loss = self.objective.loss if self.inherits("loss") else self.loss

        def of(outputs: Tensor) -> dict[str, Tensor]:
            losses = each_task(loss, self.batching)(outputs, y)
            return {"loss": losses} | self._measured(outputs, y)

        by_queries, alone = predictions
        found = {} if by_queries is None else of(by_queries)
        apart = found if alone is by_queries else of(alone)
        return found | {f"non_transductive_{name}": value for name, value in apart.items()}

    def evaluate(self, meta_params: Params, tasks: Task) -> dict[str, Tensor]:
        """Return the `scores` of B tasks after ``--eval-inner-steps`` inner steps."""
        steps = self.config.eval_inner_steps
        return self.scores(self.predictions(meta_params, tasks, steps), tasks.query_y)

    def evaluate_together(self, models: Sequence[Params], tasks: Task) -> dict[str, Tensor]:
        """Return the `scores` of an ensemble's mean outputs. Each model adapts separately.

        A classifier's outputs are logits. MAML++'s released code takes the mean of logits too, not
        of probabilities (experiment_builder.py). Raise `UserError` for a learner that overrides
        `evaluate`, because its outputs are not what is evaluated (a learner that acts).
        """
        if type(self).evaluate is not Learner.evaluate:
            name = self.config.learner
            raise UserError(f"--ensemble: --learner {name} is not evaluated by its outputs")
        steps = self.config.eval_inner_steps
        answers = [self.predictions(params, tasks, steps) for params in models]
        alone = torch.stack([each.non_transductive for each in answers]).mean(0)
        by_queries = [each.transductive for each in answers if each.transductive is not None]
        together = Predictions(torch.stack(by_queries).mean(0) if by_queries else None, alone)
        return self.scores(together, tasks.query_y)

    def mixes(self, x: Tensor) -> bool:
        """Return whether the output for an example of ``x [E, …]`` depends on the other examples.

        Then no output is non-transductive (`maml.networks.mixing`). Return False where an author
        overrides `answers` or `call_network`, because then the dependence is unknown.
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
        for name, value in found.items():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape != [len(y)]:
                raise UserError(
                    f"--learner {self.config.learner}: metrics returns {shape} as {name!r}: of "
                    f"{len(y)} tasks, with targets {list(y.shape)}, it must return [{len(y)}]"
                )
        return found

    def prepare(self, device: torch.device) -> None:
        """Move buffers to ``device``, compile usable kernels. Raise `UserError` for conflicts."""
        self.hold_buffers(device)
        try:
            self.training_problem(self.meta_parameters(), self.last_phase)
        except ValueError as error:
            # A user's learner gave the `Problem` values that contradict each other.
            raise UserError(f"--learner {self.config.learner}: {error}") from error
        reason = self.obstacle(device)
        if self.config.kernels == "native" and reason is not None:
            raise UserError(f"--kernels native: {reason}")

    def hold_buffers(self, device: torch.device) -> None:
        """Move the buffers to ``device``. Parameters stay: the methods take them as arguments."""
        for module in self.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def obstacle(self, device: torch.device) -> str | None:
        """Return why compiled kernels cannot serve this learner on ``device``; None if they can."""
        if device.type != "cpu":
            return f"the compiled kernels run on the CPU, not on --device {device.type}"
        return obstacle(self.network)
