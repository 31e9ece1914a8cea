"""``--strategy rpc``: tasks mapped over processes by RPC, gradients summed on rank 0.

Rank 0 drives and computes; the others serve. Exclusively, as in TorchOpt's distributed training,
there is a call a task: outer losses come home through a mean reducer, and the distributed backward
brings the gradients. What all tasks share goes ahead of them: the learner, a clone by reference,
once a run, and its parameters once a step. The calls that a worker has gathered are one batch
there, and one node of the graph, so that one gradient leaves it. By chunks, there is one call to
each other worker, which carries the parameters, and the answer is the sum of the gradients itself.
Either way rank 0 computes its own tasks meanwhile, without a call.

CPU tensors cross RPC; a worker computes on its own device.
"""

import time
from typing import Any, cast

import torch
import torch.distributed.rpc as rpc
import torchopt
import torchopt.distributed as todist
from torch import Tensor

from maml.config import Config
from maml.errors import WorkerLostError
from maml.learners import Learner
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import Answer, Gathering, OverRpc, reported, this
from maml.strategies.packing import OuterLosses
from maml.worker import Share, Worker

COMPONENTS = {
    "rpc": {
        "attribute": "Rpc",
        "help": "every process, called by rank 0; distributed autograd, or sums with the answers",
        "reads": ("partition", "rpc_threads"),
    }
}

YIELD = 0.0005
"""Seconds that sending a call takes the transport's threads."""


class Reference:
    """What travels of a learner: its clone by reference, once a run, and without its parameters.

    These follow once a step, as one flat tensor. Two facts of RPC stand behind it. An
    ``nn.Parameter`` is silently detached when it is pickled, so a module sent as it is trains
    nothing; a plain tensor travels with its place in the graph. And every tensor is a message part
    of its own and a node of the distributed graph: one with P elements costs a fraction of eighteen
    that add up to them.
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
        """Where it has arrived: return the learner with ``params`` in place, by name."""
        modules = dict(self.clone.named_modules())
        for name, tensor in params.items():
            path, _, attribute = name.rpartition(".")
            modules[path]._parameters[attribute] = tensor
        return self.clone


@reported
def _learn(reference: Reference) -> None:
    """Run on a worker, before its first step: take the learner that calls are for."""
    reference.clone.hold_buffers(this(Rpc).worker.device)
    this(Rpc).arrived = reference


def _begin(step: int, flat: Tensor, calls: int) -> None:
    """Run on a worker: take the parameters ``flat [P]`` of a step that has ``calls`` for it."""
    this(Rpc).gathering.begin(step, flat, calls)


def chunk_partitioner(*args: Any, **kwargs: Any) -> list[tuple[int, tuple[Any, ...], Any]]:
    """One call a worker but rank 0: split the first argument, ids ``[B]``, as evenly as B allows.

    TorchOpt's own batch partitioner hands the whole remainder to the last worker.
    """
    ids, *rest = args
    parts = ids.tensor_split(max(todist.get_world_size() - 1, 1))
    return [(rank, (part, *rest), kwargs) for rank, part in enumerate(parts, 1) if len(part)]


EXCLUSIVE = todist.dim_partitioner(0, exclusive=True, keepdim=False)


def exclusive_partitioner(ids: Tensor, step: int) -> list[tuple[int, tuple[int, int], Any]]:
    """One call a task, as TorchOpt partitions exclusively; but rank 0 need not call itself.

    A task's id goes as a number: a tensor would be a message part of its own.
    """
    calls = EXCLUSIVE(ids, step)
    return [(rank, (int(args[0]), step), {}) for rank, args, _ in calls if rank != 0 and args]


@todist.parallelize_async(partitioner=exclusive_partitioner, reducer=todist.mean_reducer)
@rpc.functions.async_execution
def exclusive_outer_rows(ids: Tensor, step: int) -> Answer:
    """One call a task of other ranks, whose ``ids`` is its id: the mean over calls of their rows.

    A row ``[1 + M + 1]`` is loss, metrics and a one. A call is answered with the step's others, and
    holds no thread until then.
    """
    return this(Rpc).gathering.call(step, int(ids))


@todist.parallelize_async(partitioner=chunk_partitioner, reducer=todist.sum_reducer)
@reported
def chunk_shares(ids: Tensor, flat: Tensor) -> Tensor:
    """One call a worker: the sum over calls of the packed share of ``ids`` at ``flat [P]``."""
    worker, packing = this(Rpc).worker, this(Rpc).packing
    params = packing.to_params(flat)
    share = worker.on_own_thread(lambda: worker.share(params, ids, worker.learner))
    # Not before the share is on its way.
    worker.look_ahead(ids, delay=0.001)
    return packing.share(share).cpu()


@todist.parallelize_async(partitioner=chunk_partitioner, reducer=list)
@reported
def chunk_evaluations(ids: Tensor, flat: Tensor, split: str) -> Tensor:
    """One call a worker: the list of per-task metrics of ``split``'s tasks at ``flat [P]``."""
    worker, params = this(Rpc).worker, this(Rpc).packing.to_params(flat)
    return worker.on_own_thread(lambda: worker.evaluate(params, split, ids, worker.learner))


class Rpc(OverRpc):
    """Map-reduce over RPC, in TorchOpt's way or with one call a worker."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.arrived: Reference | None = None
        self.gathering = Gathering(reported(self._gathered_rows))
        self._taught = False
        if world.size > 1 and config.partition == "exclusive":
            same = "--partition chunk trains the same parameters"
            self.advice = f"{same} with a call a worker, which is faster"

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Call for each task, or for each other worker's chunk."""
        by = self._by_autograd if self.config.partition == "exclusive" else self._by_chunks
        return self.packing.to_share(by(meta_params, ids))

    def _by_autograd(self, meta_params: Params, ids: Tensor) -> Tensor:
        """Call for each task, reduce, bring the gradients home; return a packed share."""
        flat = self.packing.params(meta_params).requires_grad_()
        # Exclusively partitioned tasks go round the ranks, beginning with 0.
        own, *others = [ids[rank :: self.world.size] for rank in range(self.world.size)]
        others = [part for part in others if len(part)]
        n_calls = sum(map(len, others))
        with todist.autograd.context() as context:
            # A node of the graph for each rank, so that gradients are added in their order.
            own_flat, *of_others = flat.expand(1 + len(others), -1).unbind()
            if others:
                with self.guard():
                    self._teach()
                    begun = [
                        rpc.rpc_async(rank, _begin, (context, their_flat, len(part)))
                        for rank, (their_flat, part) in enumerate(
                            zip(of_others, others, strict=True), 1
                        )
                    ]
                    pending = exclusive_outer_rows(ids, context)
                time.sleep(YIELD)  # as in `_by_chunks`
            sums = self._outer_rows(own, own_flat, self.worker.learner).sum(0)
            self.worker.look_ahead(own)
            with self.guard():
                if others:
                    mean = pending.wait()
                    torch.futures.wait_all(begun)
                    assert isinstance(mean, Tensor)
                    sums = sums + mean * n_calls
                (gradient,) = todist.autograd.grad(context, sums[0], flat)
        if gradient is None or gradient.shape != flat.shape:
            raise WorkerLostError("no gradient came home; refusing to step")
        self.wire_bytes += 2 * len(others) * flat.nbytes + ids[:n_calls].nbytes
        return torch.cat([gradient, sums.detach()])

    def _teach(self) -> None:
        """Send the learner to the other ranks, once."""
        if not self._taught:
            reference = Reference(self.worker.learner)
            others = self.others
            torch.futures.wait_all([rpc.rpc_async(rank, _learn, (reference,)) for rank in others])
            self._taught = True

    def _gathered_rows(self, tasks: list[int], flat: Tensor) -> list[Tensor]:
        """Answer the calls of a step that this rank has gathered: a row for each task."""
        if self.arrived is None:
            raise RuntimeError("a task came before its learner")
        learner, ids = self.arrived.put(self.packing.to_params(flat.detach())), torch.tensor(tasks)
        rows = self.worker.on_own_thread(lambda: self._outer_rows(ids, flat, learner))
        # Not before the gradient is on its way.
        flat.register_hook(lambda gradient: self.worker.look_ahead(ids, delay=0.001))
        return list(rows.unbind())

    def _outer_rows(self, ids: Tensor, flat: Tensor, learner: Learner) -> Tensor:
        """Return `OuterLosses` of the tasks ``ids [B]`` as a function of ``flat [P]``."""
        if not flat.requires_grad:
            raise RuntimeError("parameters came outside the graph: no gradient would come home")
        # Views without a graph: it is `flat` that leads home.
        params = self.packing.to_params(flat.detach())

        with torch.enable_grad():
            rows: Tensor = OuterLosses.apply(
                lambda: self.worker.share(params, ids, learner), self.packing, flat
            )
        return rows

    def _by_chunks(self, meta_params: Params, ids: Tensor) -> Tensor:
        """Call each other worker, compute a chunk here, add up; return a packed share."""
        own = ids.tensor_split(self.world.size)[0]
        rest = ids[len(own) :]
        flat = self.packing.params(meta_params)
        with self.guard():
            pending = chunk_shares(rest, flat) if len(rest) else None
        if pending is not None:
            # The transport's threads first: where all cores compute, they would wait for a time
            # slice of this one, and the other worker for them; it is the one that is done last.
            time.sleep(YIELD)
        share = self.worker.share(meta_params, own, self.worker.learner)
        packed = self.packing.share(share).cpu()
        self.worker.look_ahead(own)
        if pending is not None:
            with self.guard():
                others = pending.wait()
            assert isinstance(others, Tensor)
            packed += others
            n_calls = min(len(rest), self.world.size - 1)
            self.wire_bytes += 2 * n_calls * flat.nbytes + rest.nbytes
        return packed

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate a chunk on each worker; rows come back in the order of ``ids``."""
        own = ids.tensor_split(self.world.size)[0]
        rest = ids[len(own) :]
        flat = self.packing.params(meta_params)
        with self.guard():
            pending = chunk_evaluations(rest, flat, split) if len(rest) else None
        rows = [self.worker.evaluate(meta_params, split, own, self.worker.learner)]
        if pending is not None:
            with self.guard():
                rows += pending.wait()
            self.wire_bytes += (len(rows) - 1) * flat.nbytes
        return torch.cat(rows)
