"""``--strategy rpc``: tasks mapped over processes by RPC, gradients by distributed autograd.

Rank 0 drives and computes; the others serve. A step is a few waves. In a wave the ids are
partitioned, each call carries the learner as a by-reference clone, the outer losses come home
through a mean reducer, and the distributed backward brings the gradients.

CPU tensors cross RPC; a worker computes on its own device.
"""

from __future__ import annotations

import re
import threading
import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torchopt
import torchopt.distributed as todist
from torch import Tensor

from maml.config import Config
from maml.distributed import StopRequest, World, init_process, rpc_world
from maml.errors import WorkerLostError
from maml.inner import Params
from maml.learners import Learner
from maml.strategies.base import Strategy
from maml.worker import Share, Worker

STOP_GRACE = 20.0
"""Seconds that a serving process outlives a SIGTERM, for the driver to write its checkpoint."""

_worker: Worker | None = None
_finished = threading.Event()


def _this_worker() -> Worker:
    if _worker is None:
        raise RuntimeError("this process was called before its worker was ready")
    return _worker


def _finish() -> None:
    _finished.set()


def _answer() -> None:
    """Prove that this process serves."""


class _OuterLoss(torch.autograd.Function):
    """Σ outer loss as a function of the meta-parameters, its gradient computed on the way.

    The gradient is taken at once by `Worker.meta_gradient`, in batches of bounded memory, and
    scaled in ``backward``: exact, since the sum is all that leaves the worker. A call in flight
    therefore holds one gradient, not the graphs of its tasks.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, learner: Learner, names: Any, *leaves: Tensor) -> Tensor:
        params = dict(zip(names, leaves, strict=True))
        share = _this_worker().meta_gradient(params, ids, learner)
        ctx.save_for_backward(*(share.gradients[name] for name in names))
        return torch.cat([share.totals, share.totals.new_tensor([share.n_tasks])])

    @staticmethod
    def backward(ctx: Any, *from_totals: Tensor) -> Any:
        # Only the loss, element 0, is differentiable; metrics and the count are constants.
        scale = from_totals[0][0]
        return (None, None, None, *(scale * gradient for gradient in ctx.saved_tensors))


def _outer_sums(ids: Tensor, learner: Learner) -> Tensor:
    """Run on a worker: ``[1 + M + 1]``, Σ loss, Σ metrics and count of the tasks ``ids``.

    ``learner`` came with this call, so no other thread calls into it.
    """
    params = learner.meta_parameters()
    with torch.enable_grad():
        return _OuterLoss.apply(ids.reshape(-1), learner, tuple(params), *params.values())


def _evaluations(ids: Tensor, learner: Learner, split: str) -> Tensor:
    """Run on a worker: per-task metrics of ``split``'s tasks ``ids``."""
    return _this_worker().evaluate(learner.meta_parameters(), split, ids, learner)


def chunk_partitioner(*args: Any, **kwargs: Any) -> list[tuple[int, tuple[Any, ...], Any]]:
    """One call a worker: split the first argument, ids ``[B]``, as evenly as B allows.

    TorchOpt's own batch partitioner hands the whole remainder to the last worker.
    """
    ids, *rest = args
    parts = ids.tensor_split(todist.get_world_size())
    return [(rank, (part, *rest), kwargs) for rank, part in enumerate(parts) if len(part)]


@todist.parallelize(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def exclusive_outer_sums(ids: Tensor, learner: Learner) -> Tensor:
    """One call a task: the mean over calls of `_outer_sums`."""
    return _outer_sums(ids, learner)


@todist.parallelize(partitioner=chunk_partitioner, reducer=todist.mean_reducer)
def chunk_outer_sums(ids: Tensor, learner: Learner) -> Tensor:
    """One call a worker: the mean over calls of `_outer_sums`."""
    return _outer_sums(ids, learner)


@todist.parallelize(partitioner=chunk_partitioner, reducer=list)
def chunk_evaluations(ids: Tensor, learner: Learner, split: str) -> Tensor:
    """One call a worker: the list of `_evaluations`."""
    return _evaluations(ids, learner, split)


class Rpc(Strategy):
    """Map-reduce over RPC with distributed autograd (TorchOpt's distributed training)."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        exclusive = config.partition == "exclusive"
        self._outer_sums = exclusive_outer_sums if exclusive else chunk_outer_sums
        # A call in flight never waits for another, but it does hold a thread and a gradient.
        self._wave = world.size * (config.rpc_threads - 1) if exclusive else None
        self._context = rpc_world(
            world,
            threads=config.rpc_threads,
            timeout=config.rpc_timeout,
            worker_init=self._init_worker,
        )

    def _init_worker(self) -> None:
        global _worker
        init_process(self.config, self.world)
        if self.worker.device.type == "cuda":
            torch.cuda.set_device(self.worker.device)
        _worker = self.worker
        _finished.clear()

    @property
    def drives(self) -> bool:
        """Rank 0 drives."""
        return self.world.rank == 0

    def __enter__(self) -> Rpc:
        self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the serving processes, then shut down; on an error do neither."""
        if error is not None:
            self._context.__exit__(kind, error, traceback)
            return
        try:
            if self.drives:
                for rank in range(1, self.world.size):
                    self._call(rpc.rpc_sync, rank, _finish)
            self._call(self._context.__exit__, None, None, None)
        except WorkerLostError as lost:
            # All work is done; what is left is to leave without waiting.
            self._context.__exit__(type(lost), lost, lost.__traceback__)
            raise

    def share_sizes(self) -> set[int]:
        """One task, or as many as `chunk_partitioner` hands this rank."""
        if self.config.partition == "exclusive":
            return {1}
        share, left_over = divmod(self.config.meta_batch_size, self.world.size)
        return {share + (self.world.rank < left_over)}

    def serve(self) -> None:
        """Answer calls until the driver says that it is done.

        A stop signal reaches every process of a job; the driver decides when to end, and the
        others outlive the signal by `STOP_GRACE` seconds at most.
        """
        stop = StopRequest()
        stop.install()
        deadline = None
        while not _finished.wait(0.5):
            if not stop:
                continue
            deadline = deadline or time.monotonic() + STOP_GRACE
            try:
                rpc.rpc_sync(0, _answer, timeout=STOP_GRACE / 4)
            except RuntimeError:
                deadline = 0.0
            if time.monotonic() > deadline and not _finished.is_set():
                # Without a word: rank 0 has said why, or torchrun will.
                raise WorkerLostError("")

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Partition ``ids``, call, reduce, and bring the gradients home; wave by wave."""
        sums = {name: torch.zeros_like(tensor) for name, tensor in meta_params.items()}
        totals, count = None, 0
        for wave in ids.split(self._wave or len(ids)):
            with todist.autograd.context() as context:
                learner, aliases = self._by_reference(meta_params)
                reduced = self._call(self._outer_sums, wave, learner)
                # The reducer's mean is over calls, which may differ in size; both the sums and
                # the count pass through it, so their ratio is the unbiased mean over tasks.
                tasks_a_call = reduced[-1].detach()
                wave_sums = reduced[:-1] / tasks_a_call * len(wave)
                gradients = self._call(
                    todist.autograd.grad, context, wave_sums[0], tuple(aliases.values())
                )
            for name, gradient in zip(aliases, gradients, strict=True):
                if gradient is None or gradient.shape != sums[name].shape:
                    raise WorkerLostError(f"no gradient came home for {name}; refusing to step")
                sums[name] += gradient
            wave_sums = wave_sums.detach()
            totals = wave_sums if totals is None else totals + wave_sums
            count += len(wave)
        assert totals is not None
        return Share(sums, totals, count)

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate a chunk on each worker; rows come back in the order of ``ids``."""
        learner, _ = self._by_reference(meta_params)
        return torch.cat(self._call(chunk_evaluations, ids, learner, split))

    def _by_reference(self, meta_params: Params) -> tuple[Learner, Params]:
        """Return a clone of the learner that aliases ``meta_params``, and the leaves to ask for.

        A clone by reference alone would train nothing: an ``nn.Parameter`` is silently detached
        when it is pickled for RPC. Its aliases here are non-leaf views, which travel with their
        place in the graph, at no copy.
        """
        clone = torchopt.module_clone(self.worker.learner, by="reference", detach_buffers=True)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in meta_params.items()}
        for name, leaf in leaves.items():
            path, _, attribute = name.rpartition(".")
            clone.get_submodule(path)._parameters[attribute] = leaf.view_as(leaf)  # type: ignore[assignment]
        return clone, leaves  # type: ignore[return-value]

    def _call(self, function: Any, *args: Any) -> Any:
        """Call across processes; a peer's silence or failure becomes one error."""
        try:
            return function(*args)
        except RuntimeError as error:
            raise WorkerLostError(_first_line(error, self.config.rpc_timeout)) from error


def _first_line(error: Exception, timeout: float) -> str:
    text = str(error).strip()
    remote = re.search(r"On WorkerInfo\(id=(\d+).*?\):\s*(.+)", text)
    if remote:
        return f"rank {remote[1]} failed: {remote[2]}"
    line = text.splitlines()[0]
    if "timed out" in line.lower() or "timeout" in line.lower():
        return f"a worker did not answer within --rpc-timeout {timeout:g} s ({line})"
    return f"a worker failed: {line}"
