"""``--strategy rpc``: tasks mapped over processes by RPC, gradients summed on rank 0.

``--partition exclusive`` makes one call per task, as TorchOpt's distributed training does. Outer
losses return through a mean reducer, and the distributed backward pass brings the gradients. A
worker's first call of a step brings the parameters and the ids of all its tasks, and in the first
step the learner, as a clone by reference. The worker computes these as one batch and one node of
the graph, so it sends one gradient; each call is answered with its task's row.

``--partition chunk`` gives one order per other worker, with the parameters. The result is the sum
of the gradients. In both cases rank 0 computes its own tasks meanwhile.

CPU tensors cross RPC; a worker computes on its own device.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed.rpc as rpc
import torchopt
import torchopt.distributed as todist
from torch import Tensor
from torch.distributed.rpc.internal import _internal_rpc_pickler

from maml.config import Config
from maml.errors import WorkerLostError
from maml.learners import Learner
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import YIELD, Answer, OverRpc, on_strategy
from maml.strategies.packing import OuterLosses
from maml.worker import Share, Worker

COMPONENTS = {
    "rpc": {
        "attribute": "Rpc",
        "help": "rank 0 calls all processes; gradients by distributed autograd or with the answers",
        "reads": ("partition", "rpc_threads"),
    }
}


class Reference:
    """The part of a learner that travels once per run: its clone by reference, without parameters.

    The parameters follow once per step as one flat tensor, for two reasons. First, pickling
    silently detaches an ``nn.Parameter``, so a module sent with its parameters trains nothing. A
    plain tensor keeps its place in the graph. Second, every tensor is a separate message part and a
    node of the distributed graph. One tensor with P elements costs a fraction of eighteen tensors
    with P elements in total.
    """

    def __init__(self, learner: Learner) -> None:
        """Clone ``learner``, and leave its parameters out."""
        self.clone: Learner = cast(
            Learner, torchopt.module_clone(learner, by="reference", detach_buffers=True)
        )
        for module in self.clone.modules():
            for name in module._parameters:
                module._parameters[name] = None
        # CPU tensors cross RPC, and a worker computes on its own device.
        self.clone.hold_buffers(torch.device("cpu"))

    def put(self, params: Params) -> Learner:
        """On the receiving worker: return the learner with ``params`` in place, by name."""
        modules = dict(self.clone.named_modules())
        for name, tensor in params.items():
            path, _, attribute = name.rpartition(".")
            modules[path]._parameters[attribute] = tensor
        return self.clone


EXCLUSIVE = todist.dim_partitioner(0, exclusive=True, keepdim=False)

Work: TypeAlias = tuple[Tensor, list[int], Reference | None]
"""A step's parameters ``[P]``, the ids of all its tasks of one worker, and once the learner."""


def exclusive_partitioner(ids: Tensor, step: int, work: dict[int, Work]) -> list[Any]:
    """Return one call per task, as TorchOpt's exclusive partition does, but none to rank 0 itself.

    A worker's first call also brings its work. A task's id travels as a number, because a tensor
    would be a separate message part.
    """
    left = dict(work)
    tasks = [(rank, int(args[0])) for rank, args, _ in EXCLUSIVE(ids) if args]
    return [(rank, (task, step, left.pop(rank, None)), {}) for rank, task in tasks if rank != 0]


@todist.parallelize_async(partitioner=exclusive_partitioner, reducer=todist.mean_reducer)
@rpc.functions.async_execution
def exclusive_outer_rows(ids: Tensor, step: int, work: Any) -> Answer:
    """Make one call per task of the other ranks, whose id is ``ids``; return the mean of the rows.

    A row ``[1 + M + 1]`` is loss, metrics and a one. A worker answers all its calls of a step
    together. Until then a call holds no thread.
    """
    return on_strategy(Rpc.row, int(ids), step, work)


class Rpc(OverRpc):
    """Map-reduce over RPC: one call per task, as in TorchOpt, or one order per worker."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        # Until rank 0's learner comes, this process's own, which has been built in the same way.
        self.arrived: Callable[[Params], Learner] = lambda _: worker.learner
        self._taught = False
        # On a worker: the rows of the latest step by task, each computed or to be computed.
        self._step, self._rows = -1, dict[int, Answer]()
        self._rows_lock = threading.Lock()
        if world.size > 1 and config.partition == "exclusive":
            same = "--partition chunk trains the same parameters"
            self.advice = f"{same} with one call per worker, which is faster"

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Share ``ids`` out: as calls, one per task, or as chunks, one per process."""
        if self.config.partition == "exclusive":
            return self.packing.to_share(self._by_autograd(meta_params, ids))
        flat = self.packing.params(meta_params)
        own, *others = self._chunks(Rpc.packed_share, ids, flat)
        return self.packing.to_share(own + todist.sum_reducer(others) if others else own)

    def _by_autograd(self, meta_params: Params, ids: Tensor) -> Tensor:
        """Make one call per task, reduce, fetch the gradients; return a packed share."""
        flat = self.packing.params(meta_params).requires_grad_()
        # The exclusive partition gives the tasks to the ranks in turn, beginning with rank 0.
        own, *parts = [ids[rank :: self.world.size] for rank in range(self.world.size)]
        others = [part.tolist() for part in parts if len(part)]
        n_calls = sum(map(len, others))
        with todist.autograd.context() as context:
            # One graph node per rank, so that gradients are added in the order of ranks.
            own_flat, *of_others = flat.expand(1 + len(others), -1).unbind()
            if others:
                taught = [self._reference()] * len(others)
                work = dict(enumerate(zip(of_others, others, taught, strict=True), 1))
                with self.liveness.guard():
                    pending = exclusive_outer_rows(ids, context, work)
                time.sleep(YIELD)
            sums = self._outer_rows(own, own_flat, self.worker.learner).sum(0)
            with self.liveness.guard():
                if others:
                    mean = pending.wait()
                    assert isinstance(mean, Tensor)
                    sums = sums + mean * n_calls
                (gradient,) = todist.autograd.grad(context, sums[0], flat)
        if gradient is None or gradient.shape != flat.shape:
            raise WorkerLostError("no gradient reached rank 0; the step is not taken")
        self.wire_bytes += 2 * len(others) * flat.nbytes + ids[:n_calls].nbytes
        return torch.cat([gradient, sums.detach()])

    def _reference(self) -> Reference | None:
        """Return the learner to send; None if it has been sent, or if it cannot travel."""
        if self._taught:
            return None
        self._taught = True
        try:
            reference = Reference(self.worker.learner)
            _internal_rpc_pickler.serialize(reference)
        except Exception:  # of any type: copying runs the classes' own code
            return None  # A class made in a function, say, cannot travel.
        return reference

    def row(self, task: int, step: int, work: Work | None) -> Answer:
        """On a worker: return the future of a task's row.

        The one call of a step that brings the worker's ``work`` computes all rows, as one batch.
        The other calls come before or after it.
        """
        with self._rows_lock:
            if step != self._step:  # all calls of the step before have been answered
                self._step, self._rows = step, {}
            row = self._rows.setdefault(task, torch.futures.Future())
        if work is not None:
            flat, tasks, reference = work
            if reference is not None:
                reference.clone.hold_buffers(self.worker.device)
                self.arrived = reference.put
            learner = self.arrived(self.packing.to_params(flat.detach()))
            ids = torch.tensor(tasks)
            rows = self.worker.on_own_thread(lambda: self._outer_rows(ids, flat, learner))
            for one, values in zip(tasks, rows.unbind(), strict=True):
                self.row(one, step, None).set_result(values)
        return row

    def _outer_rows(self, ids: Tensor, flat: Tensor, learner: Learner) -> Tensor:
        """Return `OuterLosses` of the tasks ``ids [B]`` as a function of ``flat [P]``."""
        if not flat.requires_grad:
            raise RuntimeError("parameters came outside the graph: no gradient would come home")
        # Views without a graph: the gradient reaches rank 0 only through `flat`.
        params = self.packing.to_params(flat.detach())

        with torch.enable_grad():
            rows: Tensor = OuterLosses.apply(
                lambda: self.worker.share(params, ids, learner), self.packing, flat
            )
        return rows

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate a chunk on each process; rows come back in the order of ``ids``."""
        flat = self.packing.params(meta_params)
        return torch.cat(self._chunks(Rpc.evaluate_here, ids, flat, split))

    def evaluate_here(self, ids: Tensor, flat: Tensor, split: str) -> Tensor:
        """Return the metrics of the tasks ``ids`` of ``split`` at ``flat [P]``."""
        return self.worker.evaluate(self.packing.to_params(flat), split, ids)

    def _chunks(self, compute: Callable[..., Tensor], ids: Tensor, *more: Any) -> list[Tensor]:
        """Return ``compute(strategy, chunk, *more)`` of each process; rank 0 has the first."""
        own, *parts = ids.tensor_split(self.world.size)
        orders = {rank: (compute, part, *more) for rank, part in enumerate(parts, 1) if len(part)}
        asked = len(orders)
        self.hand_out(lambda rank: orders.pop(rank, None))
        time.sleep(YIELD)
        first = compute(self, own, *more)
        others = self.collect(lambda rank: orders.pop(rank, None), lambda of: len(of) == asked)
        return [first, *(result for _, result in others.values())]
