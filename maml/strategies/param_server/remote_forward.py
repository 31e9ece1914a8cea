"""``--ps-forward remote``: the model stays on the server, trainers call its forward over RPC.

PyTorch's RPC parameter server: a trainer sends its tasks through the server's forward, and the
backward leaves the gradients on the server, within a distributed-autograd context. There
`DistributedOptimizer` hands them to the outer loop: so a step, and its place in checkpoints, are
those of every other strategy.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.utils._pytree import tree_leaves

from maml.config import Config
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import reported, this
from maml.strategies.packing import OuterLosses
from maml.strategies.param_server.over_rpc import Event, Order, ParameterServer, Result
from maml.worker import Batch, Share, Worker


class RemoteForward(ParameterServer):
    """The server with its model, and trainers that call it.

    On the server, ``leaf`` is the leaf of the graph, all parameters in one; its values are never
    read. ``pending`` has of each trainer's forward what is known before its gradients come: a
    result with the totals alone.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.leaf = torch.zeros(self.packing.n_params, dtype=worker.dtype, requires_grad=True)
        self.pending: dict[int, Result] = {}
        self._model: tuple[int, Params] | None = None
        self._optimizer: Any = None
        # One for each trainer: its forward may run beside another's, or beside an evaluation.
        ranks = self.others if self.drives else ()
        self._learners = {rank: copy.deepcopy(worker.learner) for rank in ranks}

    def share_sizes(self) -> set[int]:
        """On the server, the parts of all trainers."""
        return {self.part_size(rank) for rank in self.others} if self.drives else set()

    def publish(self, meta_params: Params) -> Tensor:
        """Let trainers call the forward of this step's model: a copy, as the outer loop steps."""
        self._model = self._step, {name: t.detach().clone() for name, t in meta_params.items()}
        return torch.empty(0)

    def forward(self, rank: int, step: int, batches: list[Batch]) -> Tensor:
        """Return ``[1 + M + 1]``, Σ loss, Σ metrics and count of the tasks ordered in ``step``."""
        assert self._model is not None
        at, params = self._model
        learner = self._learners[rank]

        def share() -> Share:
            return self.worker.on_own_thread(lambda: self.worker.share_of(params, batches, learner))

        with torch.enable_grad():
            totals: Tensor = OuterLosses.apply(share, self.packing, self.leaf).sum(0)
        wire_bytes = sum(x.nbytes for batch in batches for x in tree_leaves(batch.tasks))
        # A gradient belongs to the step that ordered it, as its tasks do: one that comes when that
        # step is over is late, although it is of a newer model. But async takes any tasks.
        step = at if self.config.ps_mode == "async" else step
        self.pending[rank] = Result(step, totals.detach(), wire_bytes)
        return totals

    def serve(self) -> None:
        """As every trainer; the references to the server's model end before this process leaves."""
        super().serve()
        self._optimizer = None

    def compute(self, order: Order) -> None:
        """Call forward, backward and step for the tasks of ``order``; the result is delivered."""
        batches = list(self.worker.training_tasks(order.ids))
        with self.guard():
            if self._optimizer is None:
                self._optimizer = self._on_server()
            with dist_autograd.context() as context:
                totals = rpc.rpc_sync(0, _forward, (self.world.rank, order.step, batches))
                dist_autograd.backward(context, [totals[0]])  # type: ignore[attr-defined]
                self._optimizer.step(context)

    def _on_server(self) -> Any:
        # Here, as it takes every process that imports it 0.7 s, and few need it.
        from torch.distributed.optim import DistributedOptimizer

        # It warns that the optimizer is not compiled; ours only hands over.
        logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
        return DistributedOptimizer(HandOver, [rpc.rpc_sync(0, _parameters)], self.world.rank)


def _parameters() -> rpc.RRef[Tensor]:
    """Run on the server: a reference to the model's parameters."""
    return rpc.RRef(this(RemoteForward).leaf)


@reported
def _forward(rank: int, step: int, batches: list[Batch]) -> Tensor:
    """Run on the server: see `RemoteForward.forward`."""
    return this(RemoteForward).forward(rank, step, batches)


class HandOver:
    """The optimizer that `DistributedOptimizer` makes on the server: the outer loop's hand."""

    def __init__(self, leaves: list[Tensor], rank: int) -> None:
        self._leaves, self._rank = leaves, rank

    def step(self) -> None:
        """Deliver the gradients of ``rank``'s context, with the sums of its forward."""
        server = this(RemoteForward)
        found = server.pending.pop(self._rank)
        (leaf,) = self._leaves
        if leaf.grad is None:
            raise RuntimeError("the served model got no gradient")
        flat = torch.cat([leaf.grad, found.flat])
        leaf.grad = None
        server.events.put(Event(self._rank, found._replace(flat=flat), None))
