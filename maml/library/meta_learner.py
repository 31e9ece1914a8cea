"""``maml.MAML(module)`` and its family: a meta-learner is a torch module around a user's module.

Shape legend: B tasks, E examples.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets import accelerator, addresses
from datasets.episodes import reordered
from datasets.tasks import Task
from maml.config.fields import with_values
from maml.errors import UserError
from maml.execution.threads import copied
from maml.learners import Learner, engine
from maml.learners.rates import OWN
from maml.library import agreement, checking, distribution, inputs, results
from maml.library.alone import alone
from maml.library.around import Loss, OfModule, learner_around, loss_of
from maml.library.compiling import Compiling
from maml.library.fast_module import FastModule, adapted
from maml.library.flags import Flags, Signature
from maml.library.inputs import GivenTasks, as_support, as_tasks, explained, ways_of, whole
from maml.library.labels import Labels
from maml.library.saving import Saved
from maml.metagradient import draws
from maml.metagradient.by_task import Batching, alike, joined, unstacked
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.plan import Plan, Plans
from maml.networks.calls import alone_with
from maml.networks.ordinary import ExplicitNorm, switched
from maml.params import Params

TRIED = 2
"""The number of tasks on which we compare batching with a loop, before any tasks are batched."""


class MetaLearner(checking.Waiting, Saved):
    """A meta-learner around a module. It contains the program's learner of the same name.

    Its parameters are the module's own tensors and all further meta-parameters. A call with tasks
    returns their mean outer loss, whose ``backward()`` adds the meta-gradient to ``.grad``::

        learner = maml.MAML(net, inner_lr=0.1, inner_steps=5)
        optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
        loss = learner(tasks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        answers = learner.adapt(support_x, support_y)(query_x)

    A call computes loss and gradient together, so no graph grows with the inner steps. Batch norms
    use the current batch's statistics. Dropout is on in training mode, and off after ``eval()``.

    Attributes:
        learner: The program's learner, a `maml.learners.Learner`.
        metrics: ``{name: [B]}`` of the last call's tasks, as each task's accuracy. Under
            `distributed`, only of this process's tasks.
    """

    _reaching: list[tuple[str, str]] = []
    __signature__ = Signature()

    @alone()
    def __init__(
        self,
        module: nn.Module,
        *more: Any,
        loss: Loss | None = None,
        inner_loss: Loss | None = None,
        head: str | None = None,
        batching: Literal["auto", "vmap", "tasks"] = "auto",
        compile: Literal["auto", True, False] = "auto",
        **flags: Unpack[Flags],
    ) -> None:
        """Make a meta-learner.

        Args:
            module: Maps examples ``[E, …]`` to outputs ``[E, …]``, or with a ``loss`` to a tuple or
                a dictionary of outputs. We do not change the module, but its parameters learn,
                and ``freeze`` freezes them.
            loss: ``(outputs, targets) → scalar``, the mean over the examples of a set. None: the
                cross-entropy, with integer classes as targets.
            inner_loss: What the inner loop descends, if not ``loss``; it may learn, too.
            head: The name of the output layer, for learners that treat this layer separately.
            batching: How tasks are computed: "vmap" all at once, if they can be batched; "tasks"
                one by one, each in a thread. "auto" tries both on the first tasks, and leaves
                nothing behind.
            compile: Whether to compile the meta-gradient of tasks that are batched, once for each
                form of tasks. "auto" does so in the background on a CPU, after the time that this
                takes has gone into plain calls, and then goes on with other bits of rounding.
                True compiles in the first call.
            flags: Values of the flags that the program's learner reads, as ``inner_lr``.

        Raises:
            UserError: for an argument that the learner does not read, or for a value not allowed.
        """
        super().__init__()
        if more:
            raise UserError(f"{more[0]!r}: give all but the module by name, as inner_lr=0.1")
        if batching not in ("auto", "vmap", "tasks"):
            raise UserError(f"batching {batching!r}: auto, vmap or tasks")
        if compile not in ("auto", True, False):
            raise UserError(f"compile {compile!r}: auto, True or False")
        if compile is True and batching == "tasks":
            raise UserError("compile=True computes all tasks at once: leave out batching")
        own = loss_of(loss, inner_loss, module)
        given = {
            "loss": loss not in (None, F.cross_entropy),
            "inner_loss": inner_loss is not None,
            "inner_lr": isinstance(flags.get("inner_lr"), OWN),
        }
        self.given = [name for name, is_own in given.items() if is_own]
        learner = learner_around(type(self), module, own, head, {**flags})
        self._begin(learner, learner.last_phase, batching, own)
        self._compiling = Compiling(compile if batching != "tasks" else False)
        self._labels = Labels(own, of_classes=loss is None)
        self._reaching = checking.reached(own, module)
        distribution.same_everywhere(self._made_of, learner, loss)

    @classmethod
    def around(cls, learner: Learner, phase: int) -> MetaLearner:
        """Return a meta-learner around a copy of a program's learner, in a `Learner.phase`."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._begin(copy.copy(learner), phase)
        return self

    def _begin(
        self,
        learner: Learner,
        phase: int,
        batching: Literal["auto", "vmap", "tasks"] = "auto",
        loss: Loss | None = None,
    ) -> None:
        self.learner, self._phase = learner, phase
        self._made_to_train = {m for m in learner.modules() if m.training}
        self.metrics: dict[str, Tensor] = {}
        self._asked: Batching | None = None if batching == "auto" else batching
        self._loss, self._no_numbers = loss, results.NoNumbers()
        self._compiling = Compiling(False)
        self._labels = Labels(loss)
        # One plan for each mode, because dropout draws only in training mode.
        self._plans = Plans(most=2)
        self.learner.plan = Plan("tasks")  # of answers; `differentiated` takes another one
        self._learning = checking.begin_learning(self.learner)

    def _made_of(self) -> dict[str, str]:
        loss = self._loss.loss if isinstance(self._loss, OfModule) else self._loss
        return agreement.description(type(self), self.learner, loss, self._asked)

    # ---- training -------------------------------------------------------------------------------

    def forward(self, tasks: GivenTasks) -> Tensor:
        """Return the mean outer loss of tasks, a scalar that can be differentiated once.

        Args:
            tasks: ``(support_x, support_y, query_x, query_y)`` of tensors ``[B, E, …]``; or a list
                of such tuples of tensors ``[E, …]``, whose sets may have any sizes. Several inputs
                of an example are a list or tuple, as ``(ids, mask)``, for ``module(ids, mask)``, or
                a mapping, as ``{"ids": …, "mask": …}``, for ``module(ids=…, mask=…)``.

        Raises:
            UserError: for tasks of another form or dtype.
        """
        if torch.compiler.is_compiling():  # torch.compile cannot trace an inner loop
            return torch.compiler.disable(MetaLearner._mean_loss)(self, tasks)
        quick = None if distribution.group else self._compiling.quickly(self.learner, tasks)
        if quick is None:
            return self._mean_loss(tasks)
        self.metrics = quick.metrics
        if not (quick.loss.is_cpu and math.isfinite(quick.loss)):
            self._no_numbers.look(quick.losses, range(len(quick.losses)))
        return _OuterLoss.apply(quick.loss, quick.gradients, *quick.parameters)

    @alone()
    def _mean_loss(self, tasks: GivenTasks) -> Tensor:
        checking.check_learning(self._learning)
        every = self.learner.meta_parameters()
        some = next(iter(every.values()))
        given = as_tasks(tasks, some.dtype)
        with explained(given, some), torch.enable_grad():
            loss, gradients = self.differentiated(given)
        return _OuterLoss.apply(loss, [gradients[name] for name in every], *every.values())

    def differentiated(self, tasks: list[Task]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean outer loss of tasks ``[1, E, …]``, and its gradient."""
        params = {name: p.detach() for name, p in self.learner.meta_parameters().items()}
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        mine = distribution.part(len(tasks))
        losses = next(iter(params.values())).new_zeros(len(mine))
        found: dict[str, Tensor] = {}
        seed = distribution.same_number(tasks, params, self._made_of)
        if self.learner.config.inner_batch is not None:  # mini-batches are of a random order
            keys = addresses.keys(seed, "train", "support order", range(len(tasks)))
            tasks = reordered(tasks, keys)
        for own, places in self._of_each_size(tasks):
            for name in own.metric_names:
                found.setdefault(name, torch.zeros_like(losses))
            here = [i for i in places if i in mine]
            if not here:
                continue
            own = copy.copy(own)
            own.plan = self._plan(own, params, [tasks[i] for i in places])
            for given, at in self._together(own, tasks, here):
                where = [draws.Address(seed, "", i) for i in at]
                of_some = self._gradient(own, params, given, where)
                sums = {name: total + of_some.gradients[name] for name, total in sums.items()}
                rows = accelerator.sent(torch.tensor(at, device="cpu") - mine.start, losses.device)
                losses[rows] = of_some.losses.detach().to(losses)  # a loss may have another dtype
                for name, values in of_some.metrics.items():
                    found[name][rows] = values.to(losses)
        self.metrics = found
        self._no_numbers.look(losses, mine)
        plan = self._plans.known.get(self.training)
        if self.learner.config.inner_batch is not None or (plan is not None and plan.draws):
            distribution.draw_number()  # the next call draws others
        return distribution.mean(losses, sums)

    def _together(
        self, own: Learner, tasks: list[Task], places: list[int]
    ) -> Iterator[tuple[Task | list[Task], list[int]]]:
        """Yield tasks to compute in one call, and their places: a batch, or a list of any sizes."""
        alone = places
        if own.batching == "vmap" or self._compiling.may(own, own.plan):
            groups = alike(tasks, places)
            alone = [i for i, *more in groups if not more]
            for group in groups:
                if len(group) > 1:
                    yield joined([tasks[i] for i in group]), group
        if alone:
            yield [tasks[i] for i in alone], alone

    def _gradient(
        self, own: Learner, params: Params, given: Any, where: list[draws.Address]
    ) -> OuterGradient:
        def plainly(params: Params, some: Any) -> OuterGradient:
            return engine.outer_gradient(own, params, some, where, self._phase)

        if isinstance(given, list) or not self._compiling.may(own, own.plan):
            return plainly(params, given)
        recorded = copy.copy(own)
        recorded.plan = Plan("vmap")
        together = functools.partial(recorded.outer_gradient, phase=self._phase, checked=True)
        return self._compiling.gradient(own, params, given, plainly, together)

    def _of_each_size(self, tasks: list[Task]) -> Iterator[tuple[Learner, list[int]]]:
        """Yield (learner, indices of its tasks), one for each number of classes if that matters."""
        # The program's learners (without `_loss`) may get mini-batches, which have no support set.
        empty = [i for i, task in enumerate(tasks) if not inputs.n_examples(task.support_y)]
        if empty and self._loss is not None:
            raise UserError(f"task {empty[0]}: support_x is empty: there is nothing to adapt to")
        by_ways = self.learner.any_ways and inputs.n_examples(tasks[0].support_y)
        here = inputs.with_labels_here(tasks)
        learner = self.learner if by_ways else self._labels.measuring(self.learner, tasks, here)
        places: dict[int | None, list[int]] = {}
        for i, task in enumerate(here):
            ways = ways_of(i, task) if by_ways else None
            places.setdefault(ways, []).append(i)
        for ways, of_ways in places.items():
            own = learner
            if ways is not None:
                own = copy.copy(learner)
                own.config = with_values(own.config, ways=ways, train_ways=None)
            yield own, of_ways

    def _plan(self, own: Learner, params: Params, tasks: list[Task]) -> Plan:
        """Return how to compute tasks. The first calls in each mode determine this.

        ``tasks`` are those of all processes, so that all compute them alike.
        """
        same = [tasks[i] for i in max(alike(tasks, range(len(tasks))), key=len)]
        tells = len(same) >= TRIED

        def decide() -> Plan:
            with draws.alone(), alone_with(own.network):
                checking.check(own, params, tasks, self._phase, self._reaching)
                if self._asked is not None:
                    return Plan(self._asked)
                some = joined(same[:TRIED])
                return engine.plan_of(own, params, some, self._phase, weigh=tells)

        plan = self._plans.of(self.training, decide, tells=tells)
        if not tells and not plan.settled:
            plan.batching = "tasks"
        return plan

    @property
    def _some(self) -> Tensor:
        """A parameter, whose dtype and device all tasks have."""
        return next(iter(self.learner.meta_parameters().values()))

    # ---- adaptation -----------------------------------------------------------------------------

    @alone()
    def adapt(self, x: Tensor, y: Tensor, steps: int | None = None) -> FastModule:
        """Return the module after its adaptation to a support set.

        If gradients are enabled, autograd can differentiate its answers by the meta-parameters,
        through all inner steps. So you can use your own outer loss.

        Args:
            x: Examples ``[E, …]``, tensors or arrays of numpy, in the form of a task's.
            y: Their targets ``[E, …]``.
            steps: Inner steps; None: ``eval_inner_steps``.
        """
        checking.check_learning(self._learning)
        with as_support(x, y, self._some.dtype) as task, explained([task], self._some):
            ((own, _),) = self._of_each_size([task])
        support = next(unstacked(task))
        steps = own.config.eval_inner_steps if steps is None else whole(steps, "steps")
        with explained([task], self._some):
            return adapted(own, own.meta_parameters(), support, steps).train(self.training)

    @alone()
    @torch.no_grad()
    def evaluate(self, tasks: GivenTasks, steps: int | None = None) -> dict[str, Tensor]:
        """Return each task's query loss and metrics after adaptation, ``{name: [B]}``.

        ``steps`` are the inner steps; None: ``eval_inner_steps``.

        Dropout is off in every mode. If a batch norm normalises by the batch, there are also names
        that begin with ``non_transductive_``, of results that are normalised by the support set's
        statistics; and only these, with a warning, if a task has too few queries for the others.
        """
        given = as_tasks(tasks, self._some.dtype)
        with explained(given, self._some):
            return results.columns(self._evaluated(given, steps))

    def _evaluated(self, given: list[Task], steps: int | None) -> list[dict[str, Tensor]]:
        params = self.learner.meta_parameters()
        rows: list[dict[str, Tensor]] = [{}] * len(given)
        for learner, places in self._of_each_size(given):
            # Another thread may train the learner meanwhile, with dropout: switch a copy.
            with alone_with(learner.network):
                own = copied(learner) or copy.copy(learner)
                own.plan = learner.plan
            if steps is not None:
                own.config = with_values(own.config, eval_inner_steps=whole(steps, "steps"))
            some, where = [given[i] for i in places], [draws.Address(0, "", i) for i in places]
            with switched(own, training=False):
                found = engine.found_in(
                    own, lambda own, task: own.evaluate(params, task), some, where
                )
            for i, row in zip(places, found, strict=True):
                rows[i] = row
        return rows

    def train(self, mode: bool = True) -> MetaLearner:
        """Switch between training and evaluation. Batch norms keep the mode of their creation."""
        self.training = mode
        for module in self.learner.modules():
            if not isinstance(module, ExplicitNorm):
                module.training = mode and module in self._made_to_train
        return self


class _OuterLoss(torch.autograd.Function):
    """The mean outer loss as a function of meta-parameters, whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UserError(
                "create_graph: the loss is differentiated once; for more, take an outer loss of "
                "your own by adapt()"
            )
        return None, None, *torch._foreach_mul(ctx.saved_tensors, by)
