"""``--strategy rpc``: tasks mapped over processes by RPC, gradients by distributed autograd.

Rank 0 drives and computes; the others serve. The ids are partitioned, each call carries the learner
as a by-reference clone, the outer losses come home through a mean reducer, and the distributed
backward brings the gradients. Exclusively, there is a call a task, on rank 0 too, in waves; by
chunks, there is one to each other worker, and rank 0 computes its own chunk meanwhile.

CPU tensors cross RPC; a worker computes on its own device.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torchopt.distributed as todist
from torch import Tensor

from maml.config import Config
from maml.distributed import World, init_process, left_rpc, rpc_world
from maml.errors import WorkerLostError
from maml.inner import Params
from maml.strategies.attendance import heed, wait_for
from maml.strategies.base import Strategy
from maml.strategies.outer_loss import OuterLoss
from maml.strategies.packing import Packing
from maml.strategies.reference import Reference
from maml.worker import Share, Worker

PROBE = 3.0
"""Seconds in which a process that lives answers an empty call."""

_worker: Worker | None = None
_finished = threading.Event()


def _this_worker() -> Worker:
    if _worker is None:
        raise RuntimeError("this process was called before its worker was ready")
    return _worker


def _finish() -> None:
    _finished.set()


def _is_here() -> None:
    """Answer, which says enough."""


def _outer_sums(ids: Tensor, reference: Reference) -> Tensor:
    """Run on a worker: ``[1 + M + 1]``, Σ loss, Σ metrics and count of the tasks ``ids``.

    The learner came with this call, so no other thread calls into it.
    """
    worker, (learner, params) = _this_worker(), reference.resolve()

    def compute() -> Share:
        return worker.on_own_thread(lambda: worker.meta_gradient(params, ids.reshape(-1), learner))

    def look_ahead() -> None:
        # Not before the gradient is on its way; and who gets a single task next is not known.
        if ids.dim():
            worker.look_ahead(ids, delay=0.001)

    with torch.enable_grad():
        sums: Tensor = OuterLoss.apply(compute, reference.packing, reference.flat, look_ahead)
    return sums


def _evaluations(ids: Tensor, reference: Reference, split: str) -> Tensor:
    """Run on a worker: per-task metrics of ``split``'s tasks ``ids``."""
    worker, (learner, params) = _this_worker(), reference.resolve()
    return worker.on_own_thread(lambda: worker.evaluate(params, split, ids, learner))


def chunk_partitioner(*args: Any, **kwargs: Any) -> list[tuple[int, tuple[Any, ...], Any]]:
    """One call a worker but rank 0: split the first argument, ids ``[B]``, as evenly as B allows.

    TorchOpt's own batch partitioner hands the whole remainder to the last worker.
    """
    ids, *rest = args
    parts = ids.tensor_split(max(todist.get_world_size() - 1, 1))
    return [(rank, (part, *rest), kwargs) for rank, part in enumerate(parts, 1) if len(part)]


@todist.parallelize_async(
    partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
    reducer=todist.mean_reducer,
)
def exclusive_outer_sums(ids: Tensor, reference: Reference) -> Tensor:
    """One call a task: the mean over calls of `_outer_sums`."""
    return _outer_sums(ids, reference)


@todist.parallelize_async(partitioner=chunk_partitioner, reducer=todist.mean_reducer)
def chunk_outer_sums(ids: Tensor, reference: Reference) -> Tensor:
    """One call a worker: the mean over calls of `_outer_sums`."""
    return _outer_sums(ids, reference)


@todist.parallelize_async(partitioner=chunk_partitioner, reducer=list)
def chunk_evaluations(ids: Tensor, reference: Reference, split: str) -> Tensor:
    """One call a worker: the list of `_evaluations`."""
    return _evaluations(ids, reference, split)


class Rpc(Strategy):
    """Map-reduce over RPC with distributed autograd (TorchOpt's distributed training)."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        exclusive = config.partition == "exclusive"
        self._outer_sums = exclusive_outer_sums if exclusive else chunk_outer_sums
        self._packing = Packing(worker.learner.meta_parameters(), len(worker.metric_names))
        # Made once: a step only points it at other values.
        self._reference = Reference(worker.learner, self._packing)
        # A call in flight never waits for another, but it does hold a thread and a gradient.
        self._wave = world.size * (config.rpc_threads - 1) if exclusive else None

    def transport(self) -> AbstractContextManager[None]:
        """Join the RPC world."""
        return rpc_world(
            self.world,
            threads=self.config.rpc_threads,
            timeout=self.config.timeout,
            worker_init=self._init_worker,
        )

    def _init_worker(self) -> None:
        global _worker
        init_process(self.config, self.world)
        if self.drives:
            heed(self.stop)
        _worker = self.worker
        _finished.clear()

    @property
    def drives(self) -> bool:
        """Rank 0 drives."""
        return self.world.rank == 0

    def finish(self) -> None:
        """Release the serving processes."""
        if self.drives:
            for rank in range(1, self.world.size):
                rpc.rpc_sync(rank, _finish)

    def share_sizes(self) -> set[int]:
        """One task, or as many as `chunk_partitioner` hands this rank."""
        if self.config.partition == "exclusive":
            return {1}
        return {self.part_size(self.world.rank, self.world.size)}

    def serve(self) -> None:
        """Answer calls until the driver says that it is done."""
        self.stop.install()
        wait_for(_finished, self.stop, self.config.timeout)

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Call for all tasks, wave by wave; or for the others' chunks, and compute one here."""
        if self._wave is not None:
            packed = [self._mapped(meta_params, wave) for wave in ids.split(self._wave)]
            return self._packing.to_share(functools.reduce(torch.add, packed))
        own = self._own(ids)
        return self._packing.to_share(self._mapped(meta_params, ids[len(own) :], meanwhile=own))

    def _mapped(self, meta_params: Params, ids: Tensor, meanwhile: Tensor | None = None) -> Tensor:
        """Partition ``ids``, call, reduce, bring the gradients home; add those of ``meanwhile``.

        The tasks ``meanwhile`` are computed by this process itself, while the others compute.
        Returns a packed share, on the CPU.
        """
        packed = torch.zeros(self._packing.share_size, dtype=self.worker.dtype)
        with todist.autograd.context() as context:
            flat = self._reference.to(meta_params)
            with self.guard():
                pending = self._outer_sums(ids, self._reference) if len(ids) else None
            if meanwhile is not None:
                # The transport's threads first: on a busy machine they would wait for this one.
                time.sleep(0)
                share = self.worker.meta_gradient(meta_params, meanwhile, self.worker.learner)
                packed += self._packing.share(share).cpu()
                self.worker.look_ahead(meanwhile)
            if pending is not None:
                with self.guard():
                    reduced = pending.wait()
                assert isinstance(reduced, Tensor)
                # The reducer's mean is over calls, which may differ in size; both the sums and
                # the count pass through it, so their ratio is the unbiased mean over tasks.
                sums = reduced[:-1] / reduced[-1].detach() * len(ids)
                with self.guard():
                    (gradient,) = todist.autograd.grad(context, sums[0], flat)
                if gradient is None or gradient.shape != flat.shape:
                    raise WorkerLostError("no gradient came home; refusing to step")
                packed += torch.cat([gradient, sums.detach(), sums.new_tensor([len(ids)])])
                # Of each call to another rank: the parameters there, the gradients back.
                self.wire_bytes += 2 * self._calls_to_others(ids) * flat.nbytes + ids.nbytes
        return packed

    def _own(self, ids: Tensor) -> Tensor:
        """Return the first of as many parts of ``ids`` as there are ranks."""
        return ids.tensor_split(self.world.size)[0]

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate a chunk on each worker; rows come back in the order of ``ids``."""
        own = self._own(ids)
        rest = ids[len(own) :]
        sent = self._reference.to(meta_params).nbytes
        with self.guard():
            pending = chunk_evaluations(rest, self._reference, split) if len(rest) else None
        rows = [self.worker.evaluate(meta_params, split, own, self.worker.learner)]
        if pending is not None:
            with self.guard():
                rows += pending.wait()
            self.wire_bytes += (len(rows) - 1) * sent
        return torch.cat(rows)

    def _calls_to_others(self, ids: Tensor) -> int:
        """Return how many calls for ``ids`` go to other ranks than this."""
        if self._wave is None:
            return min(len(ids), self.world.size - 1)
        # Exclusively partitioned tasks go round the ranks, beginning with 0.
        return len(ids) - -(-len(ids) // self.world.size)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a peer's silence or failure into one error that names it."""
        try:
            yield
        except RuntimeError as error:
            raise WorkerLostError(self._first_line(error)) from error

    def _first_line(self, error: Exception) -> str:
        text = str(error).strip()
        remote = re.search(r"On WorkerInfo\(id=(\d+).*?\):\s*(.+)", text)
        if remote:
            return f"rank {remote[1]} failed: {remote[2]}"
        line = text.splitlines()[0]
        silent = self._silent()
        if silent:
            line = f"rank(s) {', '.join(map(str, silent))} ({line})"
        if "timed out" in text.lower() or "timeout" in text.lower():
            return f"a worker did not answer within --timeout {self.config.timeout:g} s: {line}"
        return f"a worker was lost: {line}"

    def _silent(self) -> list[int]:
        """Return the ranks that do not answer a call that costs nothing."""
        if not self.drives or left_rpc():
            return []
        asked = {}
        for rank in range(1, self.world.size):
            # Calling one that is known to be gone fails at once.
            with suppress(RuntimeError):
                asked[rank] = rpc.rpc_async(rank, _is_here, timeout=PROBE)
        silent = set(range(1, self.world.size))
        for rank, answer in asked.items():
            with suppress(RuntimeError):
                answer.wait()
                silent.remove(rank)
        return sorted(silent)
