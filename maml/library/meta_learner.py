"""``maml.MAML(module)`` and its family: a meta-learner is a module of torch around a module.

Shape legend: B tasks, E examples.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.tasks import Task
from maml.config import Config, checks, registry
from maml.config.fields import FACTS, from_values, with_values
from maml.errors import UserError
from maml.learners import Learner, one_by_one
from maml.learners.objectives import CLASSIFICATION, REGRESSION, Given
from maml.library import distribution
from maml.library.alone import alone
from maml.library.fast_module import FastModule
from maml.library.given_tasks import GivenTasks, as_tasks
from maml.metagradient import draws
from maml.metagradient.batching import Found, batching_of
from maml.metagradient.by_task import Batching
from maml.metagradient.differentiate import OuterGradient
from maml.networks.ordinary import ExplicitNorm, check_parameters, explicit
from maml.params import Params

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
ORDERS = {1: "first", 2: "second", "first": "first", "second": "second"}
NOT_HERE = (
    *("ways", "shots", "queries", "eval_queries", "train_ways", "train_shots"),
    *("inner_batch", "eval_inner_batch", "keep_moment"),
    *("msl_epochs", "first_order_epochs", "iterations_per_epoch"),
)
"""Flags of the program that are of its data, or of its iterations: here both are the user's."""
TRIED = 2
"""Tasks of the first call that are computed in both ways before any are batched."""


class MetaLearner(nn.Module):
    """A meta-learner around a module, of the class that the program trains under the same name.

    Its parameters are the module's own, the same tensors, and what else is learned. Called with
    tasks it returns their mean outer loss, whose ``backward()`` leaves the meta-gradient in
    ``.grad``::

        learner = maml.MAML(net, inner_lr=0.1, inner_steps=5)
        optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
        loss = learner(tasks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        answers = learner.adapt(support_x, support_y)(query_x)

    The gradient is computed with the loss, without a graph that grows with the inner steps. Batch
    norms normalise by the batch at hand; dropout is on in training mode, and off after ``eval()``.

    Attributes:
        learner: The program's learner, a `maml.learners.Learner`.
        metrics: Of the last call with tasks: ``{name: [B]}``, as the accuracy of each; under
            `distributed`, of this process's tasks.
    """

    @alone()
    def __init__(
        self,
        module: nn.Module,
        *,
        loss: Loss = F.cross_entropy,
        head: str | None = None,
        batching: Literal["auto", "vmap", "tasks"] = "auto",
        **flags: Any,
    ) -> None:
        """Make a meta-learner.

        Args:
            module: Maps examples ``[E, …]`` to outputs ``[E, …]``. It stays as it is; its
                parameters learn.
            loss: ``(outputs, targets) → scalar``, the mean over the examples of a set.
            head: The name of the output layer, for learners that tell it from the rest.
            batching: How tasks are computed: "vmap" all at once, "tasks" one by one, each in a
                thread. "auto" looks at the first tasks.
            flags: What the program's learner reads, by the names of its flags, as ``inner_lr``.

        Raises:
            UserError: for an argument that the learner does not read, or that has no such value.
        """
        super().__init__()
        self.metrics: dict[str, Tensor] = {}
        if batching not in ("auto", "vmap", "tasks"):
            raise UserError(f"batching {batching!r}: auto, vmap or tasks")
        self._asked: Batching | None = None if batching == "auto" else batching
        # By the mode, as dropout is of one alone.
        self._found: dict[bool, Found] = {}
        self._told = set[bool]()
        with _in_words_of_the_library():
            config = self._config(module, flags)
            objective = (CLASSIFICATION if _of_classes(loss) else REGRESSION)._replace(loss=loss)
            self.learner: Learner = self._facts().maker()(
                config, Given(_network(module, head), objective)
            )
        self.learner.batching = "tasks"  # unless the first tasks tell otherwise
        for name in self.learner.frozen:
            self.learner.network.get_parameter(name).requires_grad_(False)
        self._made_to_train = {m for m in self.learner.modules() if m.training}
        distribution.same_everywhere(self)

    @classmethod
    def _facts(cls) -> registry.LearnerFacts:
        """Return the facts of the program's learner of this name, or of its class's name."""
        known = registry.known("learner")
        of_class = {facts.attribute: name for name, facts in known.items()}
        for base in cls.__mro__:
            name = base.__name__.lower()
            name = name if name in known else of_class.get(base.__name__, "")
            if name:
                return registry.learner(name)
        raise UserError(f"{cls.__name__} is no learner: derive it from maml.MAML or another")

    def _config(self, module: nn.Module, flags: dict[str, Any]) -> Config:
        read = self._facts().reads or ()
        known = [name for name in ("freeze", *read) if name not in NOT_HERE]
        for name in flags:
            if name not in known:
                raise UserError(
                    f"{type(self).__name__} takes no {name}; besides module, loss, head and "
                    f"batching it takes {', '.join(sorted(known))}"
                )
        if "order" in flags:
            if flags["order"] not in ORDERS:
                raise UserError(f"order {flags['order']!r}: 1 or 2")
            flags["order"] = ORDERS[flags["order"]]
        if "eval_inner_steps" in known:
            flags.setdefault("eval_inner_steps", flags.get("inner_steps", Config().inner_steps))
        config = from_values(flags)
        for name, value in flags.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                checks.check_bounds(name, value)
            refused = self._facts().refuses.get(name, {})
            if value in refused:
                raise UserError(f"{name} {value}: {type(self).__name__} {refused[value]}")
        dtypes = {p.dtype for p in module.parameters()} or {torch.float32}
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
            named = ", ".join(sorted(map(str, dtypes)))
            raise UserError(f"module: its parameters are {named}; give float32 or float64 alone")
        dtype = str(dtypes.pop()).removeprefix("torch.")
        return with_values(
            config, learner=self._facts().name, network=type(module).__name__, dtype=dtype, seed=0
        )

    # ---- training -------------------------------------------------------------------------------

    @alone()
    def forward(self, tasks: GivenTasks) -> Tensor:
        """Return the mean outer loss of tasks, a scalar that can be differentiated once.

        Args:
            tasks: ``(support_x, support_y, query_x, query_y)`` of tensors ``[B, E, …]``; or a list
                of tasks, each such a tuple of ``[E, …]``, of sets of any sizes.

        Raises:
            UserError: for tasks of another form or dtype.
        """
        given = as_tasks(tasks, self._dtype)
        leaves = {n: p for n, p in self.learner.meta_parameters().items() if p.requires_grad}
        return _OuterLoss.apply(self, given, tuple(leaves), *leaves.values())

    def differentiated(self, tasks: list[Task]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean outer loss of tasks, and its gradient by every meta-parameter.

        Args:
            tasks: Of one task each, ``[1, E, …]``.
        """
        params = {name: p.detach() for name, p in self.learner.meta_parameters().items()}
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        losses = next(iter(params.values())).new_zeros(len(tasks))
        found: dict[str, Tensor] = {}
        mine = distribution.part(tasks)
        seed = distribution.same_number()
        for own, places in self._of_each_size([task for _, task in mine]):
            some = [mine[i][1] for i in places]
            addresses = [draws.Address(seed, "", mine[i][0]) for i in places]
            of_some = self._gradient(own, params, some, addresses)
            sums = {name: total + of_some.gradients[name] for name, total in sums.items()}
            losses[places] = of_some.losses.detach()
            for name, values in of_some.metrics.items():
                found.setdefault(name, values.new_zeros(len(mine)))[places] = values
        self.metrics = found
        return distribution.mean(losses[: len(mine)], sums)

    def _gradient(
        self, own: Learner, params: Params, tasks: list[Task], addresses: list[draws.Address]
    ) -> OuterGradient:
        found = self._way(own, params, tasks)
        own.draws = found.draws
        if found.batching == "tasks" or len({tuple(p.shape for p in t) for t in tasks}) > 1:
            of_all = one_by_one.outer_gradient(own, params, tasks, addresses, own.last_phase)
            # Control flow may draw in later tasks alone.
            self._found[self.training] = found._replace(draws=own.draws)
            return of_all
        own = copy.copy(own)
        own.batching = "vmap"
        return own.outer_gradient(params, _joined(tasks), own.last_phase)

    def _of_each_size(self, tasks: list[Task]) -> Iterator[tuple[Learner, list[int]]]:
        """Yield a learner for each number of classes, where it needs to know, and its tasks."""
        if not self.learner.any_ways or self.learner.objective is REGRESSION:
            if tasks:
                yield self.learner, list(range(len(tasks)))
            return
        places: dict[int, list[int]] = {}
        for i, task in enumerate(tasks):
            ways = 1 + int(task.support_y.max())
            missing = set(range(ways)) - set(task.support_y[0].tolist())
            if missing:
                raise UserError(f"task {i}: support_y has no example of class {min(missing)}")
            if int(task.query_y.max()) >= ways:
                raise UserError(f"task {i}: support_y has no example of query_y's last class")
            places.setdefault(ways, []).append(i)
        for ways, of_ways in places.items():
            learner = copy.copy(self.learner)
            learner.config = with_values(learner.config, ways=ways, train_ways=None)
            yield learner, of_ways

    def _way(self, own: Learner, params: Params, tasks: list[Task]) -> Found:
        """Return how tasks are computed, found out at the first call of a mode.

        Raises:
            NotRepeatedError: if two calls with the same tasks give two results.
        """
        known = self._found.get(self.training)
        alike = [t for t in tasks if [*map(_shape, t)] == [*map(_shape, tasks[0])]]
        tells = len(alike) >= TRIED and self.training not in self._told
        if known is not None and not tells:
            return known
        one_by_one.check(own, params, tasks, own.last_phase)
        some = _joined(alike[:TRIED])
        found = batching_of(
            lambda at: own.training_problem(at, own.last_phase), params, some, checked=True
        )
        if self._asked is not None:
            found = found._replace(batching=self._asked)
        elif not tells or (found.batching == "vmap" and one_by_one.is_heavy(own, params, some)):
            found = found._replace(batching="tasks")
        if tells:
            self._told.add(self.training)
        self._found[self.training] = found
        return found

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.learner.meta_parameters().values())).dtype

    # ---- adaptation -----------------------------------------------------------------------------

    @alone()
    def adapt(self, x: Tensor, y: Tensor, steps: int | None = None) -> FastModule:
        """Return the module as it has adapted to a support set.

        Where gradients are enabled, its answers can be differentiated by the meta-parameters,
        through all inner steps, for an outer loss of one's own.

        Args:
            x: Examples ``[E, …]``.
            y: Their targets ``[E, …]``.
            steps: Inner steps; None: ``eval_inner_steps``.
        """
        (task,) = as_tasks([(x, y, x, y)], self._dtype, leaves=False)
        ((own, _),) = self._of_each_size([task])
        steps = own.config.eval_inner_steps if steps is None else steps
        return FastModule(own, Task(*(part[0] for part in task)), steps)

    @alone()
    @torch.no_grad()
    def evaluate(self, tasks: GivenTasks) -> dict[str, Tensor]:
        """Return each task's query loss and metrics after adaptation, ``{name: [B]}``.

        Dropout is off, whatever the mode is. The names of what is normalised by the support set's
        statistics begin with ``non_transductive_``.
        """
        given, training = as_tasks(tasks, self._dtype), self.training
        params = self.learner.meta_parameters()
        rows: list[dict[str, Tensor]] = [{}] * len(given)
        try:
            self.eval()
            for own, places in self._of_each_size(given):
                some = [given[i] for i in places]
                found = one_by_one.each(own, lambda own, task: own.evaluate(params, task), some)
                for i, row in zip(places, found, strict=True):
                    rows[i] = row
        finally:
            self.train(training)
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def train(self, mode: bool = True) -> MetaLearner:
        """Switch between training and evaluation; batch norms stay as they were made."""
        self.training = mode
        for module in self.learner.modules():
            if not isinstance(module, ExplicitNorm):
                module.training = mode and module in self._made_to_train
        return self


class _OuterLoss(torch.autograd.Function):
    """The mean outer loss as a function of the meta-parameters; its gradient is taken at once."""

    @staticmethod
    def forward(
        ctx: Any, owner: MetaLearner, tasks: list[Task], names: tuple[str, ...], *leaves: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            loss, gradients = owner.differentiated(tasks)
        ctx.save_for_backward(*(gradients[name] for name in names))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> Any:
        return None, None, None, *(by * gradient for gradient in ctx.saved_tensors)


def _network(module: nn.Module, head: str | None) -> nn.Module:
    """Return a copy of a module by the protocol of `maml.networks`; its parameters are the same."""
    shared: dict[int, Any] = {id(p): p for p in module.parameters()}
    try:
        network = copy.deepcopy(module, shared)
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise UserError(f"module: it cannot be copied ({line})") from error
    check_parameters(network, type(module).__name__)
    if head is not None:
        network.head_prefix = f"{head.rstrip('.')}."  # type: ignore[assignment]
    return explicit(network, type(module).__name__)


def _of_classes(loss: Loss) -> bool:
    """Whether a loss takes targets that are classes: it is tried on some."""
    with contextlib.suppress(Exception):
        return loss(torch.zeros(2, 3), torch.tensor([0, 1])).dim() == 0
    return False


def _shape(part: Tensor) -> torch.Size:
    return part.shape


def _joined(tasks: list[Task]) -> Task:
    return Task(*(torch.cat(parts) for parts in zip(*tasks, strict=True)))


@contextlib.contextmanager
def _in_words_of_the_library() -> Iterator[None]:
    """Let messages name arguments in place of the program's flags."""
    try:
        yield
    except UserError as error:

        def argument(found: re.Match[str]) -> str:
            name = found[1].replace("-", "_")
            return "module" if name == "network" else name if name in FACTS else found[0]

        text = re.sub(r"--([a-z][a-z-]*)", argument, str(error))
        text = re.sub(r"give its class head_prefix = .*", 'give head="name of the layer"', text)
        raise UserError(text) from error
