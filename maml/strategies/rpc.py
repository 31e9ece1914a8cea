"""``--strategy rpc``: tasks mapped over processes by RPC, gradients summed on rank 0.

Rank 0 drives and computes; the others serve. ``--partition exclusive`` makes one call per task, as
TorchOpt's distributed training does. Outer losses return through a mean reducer, and the
distributed backward pass brings the gradients. Rank 0 sends shared data first: the learner, a clone
by reference, once per run, and once per step its parameters and the ids of the worker's tasks. The
worker computes these as one batch and one node of the graph, so it sends one gradient; each call
takes its row. ``--partition chunk`` makes one call per other worker. The call carries the
parameters, and its answer is the sum of the gradients.
In both cases rank 0 computes its own tasks meanwhile, without a call.

CPU tensors cross RPC; a worker computes on its own device.
"""

import itertools
import threading
import time
from collections.abc import Callable
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
from maml.strategies.over_rpc import Answer, OverRpc, answer_later, on_strategy
from maml.strategies.packing import OuterLosses
from maml.worker import Share, Worker

COMPONENTS = {
    "rpc": {
        "attribute": "Rpc",
        "help": "rank 0 calls all processes; gradients by distributed autograd or with the answers",
        "reads": ("partition", "rpc_threads"),
    }
}

YIELD = 0.0005
"""Seconds that the transport's threads need to send a call."""


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


def exclusive_partitioner(ids: Tensor, step: int) -> list[tuple[int, tuple[int, int], Any]]:
    """Return one call per task, as TorchOpt's exclusive partition does, but none to rank 0 itself.

    A task's id travels as a number, because a tensor would be a separate message part.
    """
    calls = EXCLUSIVE(ids, step)
    return [(rank, (int(args[0]), step), {}) for rank, args, _ in calls if rank != 0 and args]


@todist.parallelize_async(partitioner=exclusive_partitioner, reducer=todist.mean_reducer)
@rpc.functions.async_execution
def exclusive_outer_rows(ids: Tensor, step: int) -> Answer:
    """Make one call per task of the other ranks, whose id is ``ids``; return the mean of the rows.

    A row ``[1 + M + 1]`` is loss, metrics and a one. A worker answers all its calls of a step
    together. Until then a call holds no thread.
    """
    return answer_later(Rpc.row, step, int(ids))


class Rpc(OverRpc):
    """Map-reduce over RPC: one call per task, as in TorchOpt, or one call per worker."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        # Until rank 0's learner comes, this process's own, which has been built in the same way.
        self.arrived: Callable[[Params], Learner] = lambda _: worker.learner
        self._taught = False
        # The rows of tasks by step and task: of those that are computed, and those asked for.
        self._rows: dict[tuple[int, int], Answer] = {}
        self._rows_lock = threading.Lock()
        if world.size > 1 and config.partition == "exclusive":
            same = "--partition chunk trains the same parameters"
            self.advice = f"{same} with one call per worker, which is faster"

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Make one call per task of the other workers, or one call per other worker."""
        by = self._by_autograd if self.config.partition == "exclusive" else self._by_chunks
        return self.packing.to_share(by(meta_params, ids))

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
                with self.guard():
                    self._teach()
                    begun = [
                        rpc.rpc_async(rank, on_strategy, (Rpc.answer, context, *of_rank))
                        for rank, of_rank in enumerate(zip(of_others, others, strict=True), 1)
                    ]
                    pending = exclusive_outer_rows(ids, context)
                time.sleep(YIELD)  # as in `_chunks`
            sums = self._outer_rows(own, own_flat, self.worker.learner).sum(0)
            with self.guard():
                if others:
                    torch.futures.wait_all(begun)  # first: if one fails, its rows never come
                    mean = pending.wait()
                    assert isinstance(mean, Tensor)
                    sums = sums + mean * n_calls
                (gradient,) = todist.autograd.grad(context, sums[0], flat)
        if gradient is None or gradient.shape != flat.shape:
            raise WorkerLostError("no gradient reached rank 0; the step is not taken")
        self.wire_bytes += 2 * len(others) * flat.nbytes + ids[:n_calls].nbytes
        return torch.cat([gradient, sums.detach()])

    def _teach(self) -> None:
        """Send the learner to the other ranks, once."""
        if not self._taught:
            self._taught = True
            try:
                reference = Reference(self.worker.learner)
                given = (Rpc.learn, reference)
                calls = [rpc.rpc_async(rank, on_strategy, given) for rank in self.others]
            except Exception:  # of any type: copying runs the classes' own code
                return  # A class made in a function, say, cannot travel.
            torch.futures.wait_all(calls)

    def learn(self, reference: Reference) -> None:
        """On a worker, before its first step: take the learner that later calls use."""
        reference.clone.hold_buffers(self.worker.device)
        self.arrived = reference.put

    def row(self, step: int, task: int) -> Answer:
        """Return the future of a task's row, the same to the one who asks and the one who answers.

        Each comes once, in any order. The second takes what the first has left.
        """
        with self._rows_lock:
            if (found := self._rows.pop((step, task), None)) is None:
                found = self._rows[step, task] = torch.futures.Future()
            return found

    def answer(self, step: int, flat: Tensor, tasks: list[int]) -> None:
        """On a worker: compute the rows of ``tasks`` as one batch at ``flat [P]``; answer the calls
        of the step for them.
        """
        learner, ids = self.arrived(self.packing.to_params(flat.detach())), torch.tensor(tasks)
        rows = self.worker.on_own_thread(lambda: self._outer_rows(ids, flat, learner))
        for task, row in zip(tasks, rows.unbind(), strict=True):
            self.row(step, task).set_result(row)

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

    def _by_chunks(self, meta_params: Params, ids: Tensor) -> Tensor:
        """Let each process compute a chunk, and add up; return a packed share."""
        own, *others = self._chunks(Rpc.packed_share, ids, self.packing.params(meta_params))
        return own + todist.sum_reducer(others) if others else own

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate a chunk on each process; rows come back in the order of ``ids``."""
        flat = self.packing.params(meta_params)
        return torch.cat(self._chunks(Rpc.evaluate_here, ids, flat, split))

    def evaluate_here(self, ids: Tensor, flat: Tensor, split: str) -> Tensor:
        """Return the metrics of the tasks ``ids`` of ``split`` at ``flat [P]``."""
        params = self.packing.to_params(flat)
        return self.worker.on_own_thread(lambda: self.worker.evaluate(params, split, ids))

    def _chunks(self, compute: Callable[..., Tensor], ids: Tensor, *more: Any) -> list[Tensor]:
        """Return ``compute(strategy, chunk, *more)`` of each process; rank 0 has the first."""
        own, *parts = ids.tensor_split(self.world.size)
        calls = [(compute, part, *more) for part in parts if len(part)]
        with self.guard():
            pending = [rpc.rpc_async(rank, on_strategy, of) for rank, of in enumerate(calls, 1)]
        # Let the transport's threads send first. If all cores compute, these threads wait for a
        # time slice of this one. Then the other worker starts later, and is the last to finish.
        time.sleep(YIELD if pending else 0)
        found = [compute(self, own, *more)]
        with self.guard():
            found += [call.wait() for call in pending]
        travelled = [*itertools.chain(*calls), *found[1:]]
        self.wire_bytes += sum(one.nbytes for one in travelled if isinstance(one, Tensor))
        return found
