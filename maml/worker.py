"""A worker's share of an iteration: materialise tasks from their ids, differentiate, sum.

Every strategy calls the methods of `Worker`, so that the meta-gradient has one definition. A call
brings the parameters, and returns the sum of the gradients with the number of tasks.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets import accelerator
from datasets.episodes import Episodes
from datasets.tasks import Task
from maml.config import Config, registry
from maml.errors import UserError
from maml.execution import compiled
from maml.execution.prefetch import Prefetch
from maml.execution.stopwatch import Stopwatch
from maml.learners import Learner, build_learner, engine
from maml.learners.engine import addresses
from maml.metagradient import by_task
from maml.metagradient.plan import NotRepeatedError, Plan
from maml.networks.calls import lost_writes
from maml.params import Params

T = TypeVar("T")
LOOKED_AT = 8
"""Tasks to check for parameters that no loss reads: control flow may differ by task."""
REPEATED = (
    "The same seed must give the same numbers in every process. What is drawn from the global "
    "generators of torch, numpy or Python does: they are seeded for each task and step"
)
"""The advice to a user whose learner or network gives other numbers in a second call."""


class Share(NamedTuple):
    """The sums over some tasks; shares of disjoint tasks add up field by field.

    Attributes:
        gradients: Σ over tasks of the outer loss's gradient, by meta-parameter name; on the
            worker's device.
        totals: ``[1 + M]``: Σ over tasks of the outer loss and of the learner's M metrics.
        n_tasks: How many tasks.
        rows: ``[B, 1 + M]``: the terms of ``totals``, one row for each task in the order of the
            ids; None once shares have been added up.
    """

    gradients: Params
    totals: Tensor
    n_tasks: int
    rows: Tensor | None = None


class Batch(NamedTuple):
    """Training tasks ``ids [B]`` of one phase, before or after `Learner.materialise`."""

    phase: int
    tasks: Any
    ids: Tensor


class Worker:
    """Each process's learner and its device, and episodes that are opened on demand.

    Attributes:
        stopwatch: Measures the seconds that this process spends on ``sampling``, which includes
            the wait for prefetched tasks, and on ``computing``.
        why_one_by_one: Why ``--batching auto`` computes tasks one by one; None if it does not.
        warnings: Lines about the user's network or learner.
        send_first: Seconds after a `share` before tasks are prefetched, so that it is sent first.
    """

    send_first = 0.0

    def __init__(
        self,
        config: Config,
        device: torch.device,
        training: Episodes | None = None,
        *,
        trains: bool = True,
    ) -> None:
        """Build the learner; if it ``trains``, open the training episodes, unless given."""
        self.config = config
        self.device = device
        # Before the first operation: libraries make their contexts on the current device.
        accelerator.take(device)
        accelerator.exactly()
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._learner_facts = registry.learner(config.learner)
        self._network_facts = registry.network(config.network)
        self._theirs = self._learner_facts.is_theirs or self._network_facts.is_theirs
        self.learner = build_learner(config)
        with self._naming_theirs():
            self.learner.prepare(device)
        self._in_torch = self.learner.obstacle(self.device) is not None
        self.why_one_by_one: str | None = None
        self.warnings: list[str] = []
        self.compiled: compiled.Compiled | None = None
        self.stopwatch = Stopwatch()
        self.metric_names = ("loss", *self.learner.metric_names)
        self.evaluation_names = tuple(
            prefix + name for prefix in ("", "non_transductive_") for name in self.metric_names
        )
        # Open here, so that bad data is found before this process waits for other workers.
        if trains:
            self.training = training or self.learner.open_tasks("train")
            self._ahead = Prefetch(self.training.on(device).tasks)
            self._plan()
        self._threads = ThreadPoolExecutor(
            torch.get_num_threads(), "worker", initializer=accelerator.take, initargs=(device,)
        )

    def _plan(self) -> None:
        """Decide how tasks are computed: `maml.metagradient.plan`; ``--batching`` may ask for it.

        This project's own components are batched unless one task is work enough for a core. A
        user's own learner or network is differentiated in both ways.
        """
        config, learner, phase = self.config, self.learner, self.learner.last_phase
        auto, asked = config.batching == "auto", learner.plan.batching
        weigh = auto and self._in_torch and self.device.type == "cpu"
        if not self._theirs:
            weigh &= config.compile != "on" and self._learner_facts.tasks == "episodes"
            params = learner.meta_parameters()
            if weigh and engine.is_heavy(learner, params, self.training.tasks(torch.arange(1))):
                learner.plan = Plan("tasks", shares=False, heavy=True)
                self.why_one_by_one = learner.plan.why("it")
            return
        facts = {"learner": self._learner_facts, "network": self._network_facts}
        flag = " or ".join(f"--{kind} {of.name}" for kind, of in facts.items() if of.is_theirs)
        with self._naming_theirs():
            some = accelerator.sent(self.training.tasks(torch.arange(LOOKED_AT)), self.device)
            params = self._here(learner.meta_parameters())
            learner.plan = Plan("tasks", shares=False)
            made = learner.materialise(params, some, phase)
            with lost_writes(lambda line: self.warnings.append(f"warning: {flag}: {line}")):
                learner.checked_way(params, made, phase)
            if isinstance(made, list):  # sets of different sizes
                if config.batching == "vmap":
                    raise UserError("--batching vmap: the tasks come as a list; leave it out")
                return
            made = pytree.tree_map(lambda tensor: tensor[:2], made)
            # A first call. It raises the errors that training would raise, and fills caches.
            weigh &= engine.is_heavy(learner, params, made)
            try:
                plan = engine.plan_of(learner, params, made, phase, weigh=weigh)
            except NotRepeatedError as error:
                raise UserError(f"{flag}: {error}. {REPEATED}") from error
        why, plan.shares = plan.why(flag), bool(plan.shares)
        if auto:
            self.why_one_by_one = why
        elif asked == "vmap" and why:
            raise UserError(f"--batching vmap: {why}; leave it out, or give tasks")
        else:
            plan.batching = asked
        learner.plan = plan

    def _naming_theirs(self) -> AbstractContextManager[None]:
        """Turn an error of a user's own learner or network into a line that names it."""
        return registry.calling(learner=self._learner_facts, network=self._network_facts)

    @functools.cache  # noqa: B019 — a worker lives as long as its process
    def evaluation(self, split: str) -> Episodes:
        """Return the tasks of ``split`` that the learner is evaluated on."""
        return self.learner.open_tasks(split, evaluation=True)

    @functools.cache  # noqa: B019
    def _evaluation_here(self, split: str) -> Episodes:
        return self.evaluation(split).on(self.device)

    def on_own_thread(self, compute: Callable[[], T]) -> T:
        """Return ``compute()``, run on one of the worker's own threads, as many as torch has.

        A transport has many threads. These few reuse warm working memory, and share the cores. The
        main thread computes itself.
        """
        if threading.current_thread() is threading.main_thread():
            return compute()
        return self._threads.submit(compute).result()

    def get_ready(self, sizes: Iterable[int]) -> None:
        """Apply ``--compile`` from here on; compile now for each number of tasks in ``sizes``."""
        learner = self.learner
        self.compiled = compiled.choose(
            self.config, self.device, in_torch=self._in_torch,
            batched=learner.batching == "vmap", draws=learner.plan.draws,
            reads=[type(learner), learner.network, learner.criterion],
        )  # fmt: skip
        for size in sizes if self.compiled is not None else ():
            tasks = self.training_tasks(torch.arange(size))
            self.share_of(learner.meta_parameters(), tasks, learner)

    def why_no_kernels(self) -> str | None:
        """Return why this run cannot use compiled kernels; None if it can, or is not meant to."""
        few_shot = self._learner_facts.tasks == "episodes" and self.learner.image_shape is not None
        if not few_shot or self.config.kernels != "auto" or self.device.type != "cpu":
            return None
        return self.learner.obstacle(self.device)

    def why_transductive(self, split: str) -> str | None:
        """Return why all answers to tasks of ``split`` are transductive; None if some are not."""
        if not self._theirs or self._learner_facts.tasks == "environments":
            return None
        with self._naming_theirs():
            first = next(by_task.one_by_one(self.evaluation(split).tasks(torch.arange(1))))
            if not isinstance(first, Task) or not self.learner.mixes(first.query_x[0]):
                return None
        name = self.config.network
        return f"--network {name}: an example's answer depends on the other examples of its set"

    def share(self, meta_params: Params, ids: Tensor, learner: Learner) -> Share:
        """Sum the meta-gradient and the metrics over the training tasks ``ids [B]``, B ≥ 0.

        ``meta_params`` may be on any device. No other thread may use the ``learner`` meanwhile.
        Afterwards, prefetch tasks that follow ``ids`` in the next step; see `Prefetch.guess`.
        """
        share = self.share_of(meta_params, self.training_tasks(ids), learner)
        for first in self._batches(ids)[:1]:
            self._ahead.guess(first + self.config.meta_batch_size, self.send_first)
        return share

    def training_tasks(self, ids: Tensor) -> Iterator[Batch]:
        """Yield the training tasks ``ids`` in batches of a bounded size."""
        learner, size, batches = self.learner, self.config.meta_batch_size, []
        for phase, run in itertools.groupby(ids.tolist(), lambda id: learner.phase(id // size)):
            batches += [(phase, batch) for batch in self._batches(torch.tensor(list(run)))]
        made = self._ahead.tasks([batch for _, batch in batches])
        for (phase, ids), tasks in zip(batches, made, strict=True):
            yield Batch(phase, tasks, ids)

    def share_of(self, meta_params: Params, batches: Iterable[Batch], learner: Learner) -> Share:
        """Sum as `share` does, over ``batches`` of tasks that the caller has."""
        params = self._here(meta_params)
        sums = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        totals = torch.zeros(len(self.metric_names), dtype=self.dtype, device=self.device)
        rows = [totals.new_empty(0, len(totals))]
        n_tasks = 0
        for phase, tasks, ids in self.stopwatch.following("sampling", batches):
            with self.stopwatch.spent_on("sampling"):
                made = self._materialised(
                    params, accelerator.sent(tasks, self.device), ids, learner, phase
                )
            with self.stopwatch.spent_on("computing"):
                # Only the last phase's function is compiled: a long training ends in it.
                call = self.compiled if phase == learner.last_phase else None
                where = addresses(learner, "train", ids)
                outer = engine.outer_gradient(learner, params, made, where, phase, call)
                for name, total in sums.items():
                    total += outer.gradients[name]
                metrics = [outer.metrics[name] for name in learner.metric_names]
                rows.append(torch.stack([outer.losses, *metrics], dim=1))
                totals += rows[-1].sum(0)
            n_tasks += len(outer.losses)
        return Share(sums, totals, n_tasks, torch.cat(rows))

    def _materialised(
        self, params: Params, tasks: Any, ids: Tensor, learner: Learner, phase: int
    ) -> Any:
        if learner.inherits("materialise"):
            return tasks
        where = addresses(learner, "train", ids)
        played = engine.found_in(
            learner, lambda own, some: own.materialise(params, some, phase), tasks, where
        )
        together = learner.batching == "vmap" and not isinstance(tasks, list)
        return played[0] if together else played

    def evaluate(self, models: Params | Sequence[Params], split: str, ids: Tensor) -> Tensor:
        """Return each task's metrics, ``[T, len(evaluation_names)]``, without meta-gradient.

        ``models``: one model, or those of an ensemble (`Learner.evaluate_together`).
        """
        here = [self._here(each) for each in ([models] if isinstance(models, dict) else models)]

        def row(own: Learner, tasks: Any) -> Tensor:
            if isinstance(models, dict):
                metrics = own.evaluate(here[0], tasks)
            else:
                metrics = own.evaluate_together(here, tasks)
            if "loss" not in metrics:
                raise UserError(
                    "a task of one query has no statistics by which a batch norm would normalise "
                    "it: give more queries (--eval-queries)"
                )
            return torch.stack([metrics[name] for name in self.evaluation_names], dim=1)

        rows = self.evaluated(split, ids, row)
        if not rows:
            return torch.empty(0, len(self.evaluation_names), dtype=self.dtype)
        return torch.cat(rows).cpu()

    def _here(self, params: Params) -> Params:
        return {name: tensor.detach().to(self.device) for name, tensor in params.items()}

    @torch.no_grad()
    def evaluated(
        self, split: str, ids: Tensor, of: Callable[[Learner, Any], Tensor]
    ) -> list[Tensor]:
        """Return ``of(learner, tasks)`` for batches of the tasks ``ids`` of a split, in order."""
        learner, batches, found = self.learner, self._batches(ids), list[Tensor]()
        made = Prefetch(self._evaluation_here(split).tasks).tasks(batches)
        with engine.at_test(learner):
            for of_batch, tasks in zip(batches, made, strict=True):
                where = addresses(learner, split, of_batch)
                found += engine.found_in(learner, of, tasks, where)
        return found

    def _batches(self, ids: Tensor) -> list[Tensor]:
        """Split ids into batches of at most ``--task-batch`` tasks, to bound the memory."""
        return [batch for batch in ids.split(self.config.task_batch) if len(batch)]
