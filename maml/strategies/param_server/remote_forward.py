"""``--ps-forward remote``: the model stays on the server; trainers call its forward over RPC.

This is PyTorch's RPC parameter server. A trainer sends its tasks through the server's forward pass.
The backward pass leaves the gradient on the server, in a distributed-autograd context, from which
the outer loop gets it. So a step and its checkpoints are as with every other strategy.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor

from datasets import accelerator
from maml.config import Config
from maml.execution.threads import copied
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import Answer, bytes_of, on_strategy
from maml.strategies.packing import OuterLosses
from maml.strategies.param_server.over_rpc import ParameterServer
from maml.worker import Batch, Share, Worker


class RemoteForward(ParameterServer):
    """The server with its model, and trainers that call it.

    On the server, ``leaf`` is the leaf of the graph: one tensor for all parameters, whose values
    are never read. ``pending`` holds for each trainer what its forward pass has left: a packed
    share, with only the totals until the gradients come, and the bytes that were sent.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.leaf = torch.zeros(self.packing.n_params, dtype=worker.dtype, requires_grad=True)
        self.pending: dict[int, tuple[Tensor, int]] = {}
        self._model: tuple[int, Params] | None = None
        # One learner per trainer: the forwards of several, and an evaluation, may run at once.
        ranks = self.others if self.drives else ()
        learner = worker.learner
        self._learners = {rank: copied(learner) or copy.deepcopy(learner) for rank in ranks}

    def share_sizes(self) -> set[int]:
        """Return the sizes of all trainers' parts on the server, and none on a trainer."""
        return {self.part_size(rank) for rank in self.others} if self.drives else set()

    def publish(self, meta_params: Params) -> Tensor:
        """Let trainers call the forward of a copy: the outer loop changes the model itself."""
        self._model = self.round, {name: t.detach().clone() for name, t in meta_params.items()}
        return torch.empty(0)

    def forward(self, rank: int, batches: list[Batch]) -> Tensor:
        """On the server: return ``[1 + M + 1]``: Σ loss, Σ metrics and count of its tasks."""
        assert self._model is not None
        at, params = self._model
        learner = self._learners[rank]

        def share() -> Share:
            return self.worker.on_own_thread(lambda: self.worker.share_of(params, batches, learner))

        with torch.enable_grad():
            totals: Tensor = OuterLosses.apply(share, self.packing, self.leaf).sum(0)
        self.pending[rank] = totals.detach(), bytes_of([batch.tasks for batch in batches])
        # A gradient and its tasks belong to the step that ordered them. After that step it is
        # late, even if its model is newer. But async takes any tasks: its model's step counts.
        if self.is_async:
            self.under_way[rank] = at, self.under_way[rank][1]
        return totals

    def deliver(self, rank: int, context: int) -> None:
        """On the server: take in the gradient of a trainer's tasks, and the sums of their forward.

        ``context``: the distributed-autograd context that has the gradient.
        """
        gradients = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]
        if self.leaf not in gradients:
            raise RuntimeError("the served model got no gradient")
        totals, sent = self.pending[rank]
        self.pending[rank] = torch.cat([gradients[self.leaf], totals]), sent

    def exchange(self, rank: int, result: None, wire_bytes: int | None = None) -> Answer:
        """On the server: take in the share that `deliver` has left; see `OverRpc.exchange`."""
        return super().exchange(rank, *self.pending.pop(rank, (result, wire_bytes)))

    def compute(self, ids: Tensor, params: Tensor) -> None:
        """Call forward and backward for the tasks ``ids``; then deliver the gradient there."""
        cpu = torch.device("cpu")
        batches = [accelerator.sent(batch, cpu) for batch in self.worker.training_tasks(ids)]
        rank = self.world.rank
        with self.liveness.guard(), dist_autograd.context() as context:
            totals = rpc.rpc_sync(0, on_strategy, (RemoteForward.forward, rank, batches))
            dist_autograd.backward(context, [totals[0]])  # type: ignore[attr-defined]
            rpc.rpc_sync(0, on_strategy, (RemoteForward.deliver, rank, context))
