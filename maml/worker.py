"""A worker's share of an iteration: materialise tasks from their ids, differentiate, sum.

Every strategy calls the methods of `Worker`; here, and nowhere else, is what a meta-gradient
is. Parameters come with the call, gradients leave as a sum with its count.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.episodes import Episodes
from datasets.tasks import Task
from maml.config import Config, registry
from maml.errors import UserError
from maml.execution import compiled
from maml.execution.prefetch import Prefetch
from maml.execution.stopwatch import Stopwatch
from maml.learners import Learner, build_learner, one_by_one
from maml.learners.one_by_one import addresses
from maml.metagradient import by_task, differentiate
from maml.metagradient.batching import NotRepeatedError, batching_of
from maml.networks.ordinary import switched
from maml.params import Params

T = TypeVar("T")
LOOKED_AT = 8
"""Tasks in one of which each parameter must be read: control flow may choose in each."""
REPEATED = (
    "The same seed must give the same numbers in every process. What is drawn from the global "
    "generators of torch, numpy or Python does: they are seeded for each task and step"
)
"""What a network must do whose numbers are not repeated."""


class Share(NamedTuple):
    """What tasks add up to; shares of disjoint tasks add up field by field.

    Attributes:
        gradients: Σ over tasks of the outer loss's gradient, by meta-parameter name; on the
            worker's device.
        totals: ``[1 + M]``: Σ over tasks of the outer loss and of the learner's M metrics.
        n_tasks: How many tasks.
        rows: ``[B, 1 + M]``: what ``totals`` is the sum of, for each task, in the order of their
            ids; None once shares have been added up.
    """

    gradients: Params
    totals: Tensor
    n_tasks: int
    rows: Tensor | None = None


class Batch(NamedTuple):
    """Training tasks of one phase (`Learner.phase`), of the ids ``ids [B]``, made or to be made."""

    phase: int
    tasks: Any
    ids: Tensor


_HEAVY = "one task is work enough for a core"


class Worker:
    """What every process of a run holds: a learner, its device, and episodes opened on demand.

    Attributes:
        stopwatch: What this process spends its training on: ``sampling``, the wait for tasks that
            are being made, and ``computing``.
        why_one_by_one: Why tasks are computed one by one, where nobody asked for it; or None.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        training: Episodes | None = None,
        *,
        trains: bool = True,
    ) -> None:
        """Build the learner; open the training episodes, unless given or it only evaluates."""
        self.config = config
        self.device = device
        if device.type == "cuda":
            # Before the first operation: libraries make their contexts on the device that is set.
            torch.cuda.set_device(device)
            # Torch's own default is True: convolutions in TF32 without being asked.
            torch.backends.cudnn.allow_tf32 = False
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._learner_facts = registry.learner(config.learner)
        self._network_facts = registry.network(config.network)
        self._theirs = self._learner_facts.is_theirs or self._network_facts.is_theirs
        self.learner = build_learner(config)
        with self._naming_theirs():
            self.learner.prepare(device)
        self._in_torch = self.learner.in_torch(self.device)
        self.why_one_by_one: str | None = None
        self.compiled: compiled.Compiled | None = None
        self.stopwatch = Stopwatch()
        self.metric_names = ("loss", *self.learner.metric_names)
        self.evaluation_names = tuple(
            prefix + name for prefix in ("", "non_transductive_") for name in self.metric_names
        )
        # Opened here so that bad data is known before any other worker is waited for.
        if trains:
            self.training = training or self.learner.open_tasks("train")
            self._ahead = Prefetch(self.training.tasks)
            self._choose_batching()
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="worker")

    def _choose_batching(self) -> None:
        """Differentiate two tasks, those of a user's own learner or network also one by one.

        Training computes tasks one by one where the two differ, where tasks cannot be batched or
        draw random numbers, and where one task is work enough (`one_by_one.is_heavy`).
        """
        if not self._theirs:
            self._choose_by_work()
            return
        which = "network" if self._network_facts.is_theirs else "learner"
        flag = f"--{which} {getattr(self.config, which)}"
        with self._naming_theirs():
            some = self._on_device(self.training.tasks(torch.arange(LOOKED_AT)))
            params = {n: p.to(self.device) for n, p in self.learner.meta_parameters().items()}
            made = self.learner.materialise(params, some)
            self.learner.batching = "tasks"
            if isinstance(made, list):  # their sets may be of any sizes
                return
            self.learner.checked_way(params, made, self.learner.last_phase)
            made = pytree.tree_map(lambda tensor: tensor[:2], made)
            # In the dtype of the run: what it raises is what training would.
            heavy = one_by_one.is_heavy(self.learner, params, made)
            on_cpu = self._in_torch and self.device.type == "cpu"
            heavy = heavy and on_cpu and self.config.batching == "auto"
            try:
                found = batching_of(
                    lambda at: self.learner.training_problem(at, 0), params, made,
                    self.config.meta_gradient, checked=True, heavy=heavy,
                )  # fmt: skip
            except NotRepeatedError as error:
                raise UserError(f"{flag}: {error}. {REPEATED}") from error
        self.learner.draws = found.draws
        able = found.batching == "vmap"
        if self.config.batching == "vmap" and not able:
            raise UserError(
                f"--batching vmap: {flag} draws, cannot be batched, or has another gradient then "
                "than in a plain loop; leave it out, or give tasks"
            )
        if self.config.batching != "auto":
            self.learner.batching = self.config.batching
            return
        if self.learner.draws:
            self.why_one_by_one = f"{flag} draws random numbers (one core each: --workers N)"
        elif heavy:
            self.why_one_by_one = _HEAVY
        elif not able:
            self.why_one_by_one = f"torch.func.vmap cannot batch {flag}, or finds another gradient"
        else:
            self.learner.batching = "vmap"

    def _choose_by_work(self) -> None:
        """Let tasks of this project's own components be batched, if torch has little work each."""
        if self.config.batching != "auto":
            self.learner.batching = self.config.batching
            return
        in_torch = self._in_torch and self.device.type == "cpu" and self.config.compile != "on"
        if self._learner_facts.tasks != "episodes" or not in_torch:
            return
        params = self.learner.meta_parameters()
        if one_by_one.is_heavy(self.learner, params, self.training.tasks(torch.arange(1))):
            self.learner.batching, self.why_one_by_one = "tasks", _HEAVY

    def _naming_theirs(self) -> AbstractContextManager[None]:
        """Turn what a user's own learner or network raises into a line that names it."""
        return registry.calling(learner=self._learner_facts, network=self._network_facts)

    @functools.cache  # noqa: B019 — a worker lives as long as its process
    def evaluation(self, split: str) -> Episodes:
        """Return the tasks of ``split`` that the learner is evaluated on."""
        return self.learner.open_tasks(split, evaluation=True)

    def on_own_thread(self, compute: Callable[[], T]) -> T:
        """Return ``compute()``, run on one of the worker's own threads: as many as torch has.

        A transport has many threads. These few find working memory warm, and share the cores.
        """
        return self._threads.submit(compute).result()

    def get_ready(self, sizes: Iterable[int]) -> None:
        """Do as ``--compile`` says from here on, at once for calls with so many training tasks."""
        learner = self.learner
        self.compiled = compiled.choose(
            self.config, self.device, in_torch=self._in_torch,
            batched=learner.batching == "vmap", draws=learner.draws,
        )  # fmt: skip
        for size in sizes if self.compiled is not None else ():
            self.share(learner.meta_parameters(), torch.arange(size), learner)

    def why_no_kernels(self) -> str | None:
        """Return why compiled kernels do not serve this run; None where they do, or nobody asks."""
        few_shot = self._learner_facts.tasks == "episodes" and self.learner.image_shape is not None
        if not few_shot or self.config.kernels != "auto" or self.device.type != "cpu":
            return None
        return self.learner.obstacle(self.device)

    def why_transductive(self, split: str) -> str | None:
        """Return why no answer to the tasks of ``split`` is non-transductive; None: some are."""
        if not self._theirs or self._learner_facts.tasks == "environments":
            return None
        with self._naming_theirs():
            first = next(by_task.one_by_one(self.evaluation(split).tasks(torch.arange(1))))
            if not isinstance(first, Task) or not self.learner.mixes(first.query_x[0]):
                return None
        name = self.config.network
        return f"--network {name} answers an example by the others that are asked together with it"

    def share(self, meta_params: Params, ids: Tensor, learner: Learner) -> Share:
        """Sum the meta-gradient and the metrics over the training tasks ``ids [B]``, B ≥ 0.

        ``meta_params`` are on any device. No other thread uses the ``learner`` meanwhile.
        """
        return self.share_of(meta_params, self.training_tasks(ids), learner)

    def training_tasks(self, ids: Tensor) -> Iterator[Batch]:
        """Yield the training tasks ``ids`` in batches of a bounded size, on the CPU."""
        # Most learners have one phase alone.
        phases = [0] * len(ids)
        if self.learner.last_phase > 0:
            size = self.config.meta_batch_size
            phases = [self.learner.phase(id // size) for id in ids.tolist()]
        batches = []
        for phase, run in itertools.groupby(range(len(ids)), key=phases.__getitem__):
            places = list(run)
            of_phase = self._batches(ids[places[0] : places[-1] + 1])
            batches += [(phase, batch) for batch in of_phase]
        made = self._ahead.tasks([batch for _, batch in batches])
        for (phase, ids), tasks in zip(batches, made, strict=True):
            yield Batch(phase, tasks, ids)

    def look_ahead(self, ids: Tensor, delay: float = 0.0) -> None:
        """Begin with the tasks that follow ``ids [B]`` in the next step; see `Prefetch.guess`."""
        if len(ids):
            self._ahead.guess(self._batches(ids)[0] + self.config.meta_batch_size, delay)

    def share_of(self, meta_params: Params, batches: Iterable[Batch], learner: Learner) -> Share:
        """Sum as `share` does, over tasks that are at hand, or are made already."""
        params = self._here(meta_params)
        sums = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        totals = torch.zeros(len(self.metric_names), dtype=self.dtype, device=self.device)
        rows = [totals.new_empty(0, len(totals))]
        n_tasks = 0
        for phase, tasks, ids in self.stopwatch.following("sampling", batches):
            with self.stopwatch.spent_on("sampling"):
                made = learner.materialise(params, self._on_device(tasks))
            with self.stopwatch.spent_on("computing"):
                outer = self._differentiate(params, made, ids, learner, phase)
                for name, total in sums.items():
                    total += outer.gradients[name]
                metrics = [outer.metrics[name] for name in learner.metric_names]
                rows.append(torch.stack([outer.losses, *metrics], dim=1))
                totals += rows[-1].sum(0)
            n_tasks += len(outer.losses)
        return Share(sums, totals, n_tasks, torch.cat(rows))

    def _differentiate(
        self, params: Params, tasks: Any, ids: Tensor, learner: Learner, phase: int
    ) -> differentiate.OuterGradient:
        # Compiled is one function alone: that of the phase which most of a training is in.
        call = self.compiled if phase == learner.last_phase else None
        if _one_by_one(learner, tasks):
            where = addresses(learner, "train", ids)
            return one_by_one.outer_gradient(learner, params, tasks, where, phase, call)
        if call is None:
            return learner.outer_gradient(params, tasks, phase)
        return call(functools.partial(learner.outer_gradient, phase=phase), params, tasks)

    def evaluate(
        self, models: Params | Sequence[Params], split: str, ids: Tensor, learner: Learner
    ) -> Tensor:
        """Return each task's metrics, ``[T, len(evaluation_names)]``, without meta-gradient.

        ``models``: one, or the several of an ensemble (`Learner.evaluate_together`).
        """
        here = [self._here(each) for each in ([models] if isinstance(models, dict) else models)]

        def row(own: Learner, tasks: Any) -> Tensor:
            if isinstance(models, dict):
                metrics = own.evaluate(here[0], tasks)
            else:
                metrics = own.evaluate_together(here, tasks)
            return torch.stack([metrics[name] for name in self.evaluation_names], dim=1)

        rows = self.evaluated(learner, split, ids, row)
        if not rows:
            return torch.empty(0, len(self.evaluation_names), dtype=self.dtype)
        return torch.cat(rows).cpu()

    def _here(self, params: Params) -> Params:
        return {name: tensor.detach().to(self.device) for name, tensor in params.items()}

    @torch.no_grad()
    def evaluated(
        self, learner: Learner, split: str, ids: Tensor, of: Callable[[Learner, Any], Tensor]
    ) -> list[Tensor]:
        """Return ``of(learner, tasks)`` for batches of the tasks ``ids`` of a split, in order."""
        batches, found = self._batches(ids), list[Tensor]()
        made = Prefetch(self.evaluation(split).tasks).tasks(batches)
        # Dropout is off at test, unless it is asked for.
        learner.draws = learner.draws or self.config.eval_draws
        with switched(learner.network, training=self.config.eval_draws):
            for of_batch, tasks in zip(batches, map(self._on_device, made), strict=True):
                if _one_by_one(learner, tasks):
                    found += one_by_one.each(
                        learner, of, tasks, addresses(learner, split, of_batch)
                    )
                else:
                    found.append(of(learner, tasks))
        return found

    def _batches(self, ids: Tensor) -> list[Tensor]:
        """Split ids into batches of a bounded size: memory stays bounded, too."""
        return [batch for batch in ids.split(self.config.task_batch) if len(batch)]

    def _on_device(self, tasks: Any) -> Any:
        if self.device.type == "cpu":
            return tasks
        if self.device.type == "cuda":
            # From memory that stays in place the copy goes on beside the computation.
            tasks = pytree.tree_map(torch.Tensor.pin_memory, tasks)
        return pytree.tree_map(lambda part: part.to(self.device, non_blocking=True), tasks)


def _one_by_one(learner: Learner, tasks: Any) -> bool:
    return isinstance(tasks, list) or learner.batching == "tasks"
