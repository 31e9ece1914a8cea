"""``--ps-forward remote``: the model stays on the server, trainers call its forward over RPC.

PyTorch's RPC parameter server: a trainer sends its tasks through the server's forward, and the
backward leaves the gradients on the server, within a distributed-autograd context. There
`DistributedOptimizer` hands them to the outer loop: so a step, and its place in checkpoints, are
those of every other strategy.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.utils._pytree import tree_leaves

from maml.params import Params
from maml.strategies.over_rpc import reported
from maml.strategies.packing import OuterLosses, Packing
from maml.strategies.param_server.inbox import Inbox, Order, Result
from maml.worker import Batch, Share, Worker

if TYPE_CHECKING:
    from torch.distributed.optim import DistributedOptimizer


class _Pending(NamedTuple):
    """A forward whose gradients are still to come."""

    step: int
    totals: Tensor
    wire_bytes: int


class ServedModel:
    """On the server: its model, and what trainers have computed with it and not stepped yet."""

    def __init__(
        self,
        worker: Worker,
        packing: Packing,
        inbox: Inbox,
        trainers: Iterable[int],
        *,
        of_its_order: bool,
    ) -> None:
        """Compute with ``worker`` for ``trainers``; the gradients come to ``inbox``.

        ``of_its_order``: whether a gradient belongs to the step that ordered it, as its tasks do:
        one that comes when that step is over is late, although it is of a newer model.
        """
        self.worker, self.inbox, self._of_its_order = worker, inbox, of_its_order
        self._model: tuple[int, Params] | None = None
        self._packing = packing
        # The leaf of the graph, all parameters in one; its values are never read.
        self.leaf = torch.zeros(self._packing.n_params, dtype=worker.dtype, requires_grad=True)
        self.pending: dict[int, _Pending] = {}
        # One for each: its forward may run beside another's, and beside an evaluation. Made now,
        # while nobody calls the one that is copied.
        self._learners = {rank: copy.deepcopy(worker.learner) for rank in trainers}
        global _served
        _served = self

    def publish(self, step: int, meta_params: Params) -> None:
        """Let trainers call the forward of this step's model: a copy, as the outer loop steps."""
        self._model = step, {name: t.detach().clone() for name, t in meta_params.items()}

    def forward(self, rank: int, step: int, batches: list[Batch]) -> Tensor:
        """Return ``[1 + M + 1]``, Σ loss, Σ metrics and count of the tasks ordered in ``step``."""
        assert self._model is not None
        at, params = self._model
        learner = self._learners[rank]

        def share() -> Share:
            return self.worker.on_own_thread(lambda: self.worker.share_of(params, batches, learner))

        with torch.enable_grad():
            totals: Tensor = OuterLosses.apply(share, self._packing, self.leaf).sum(0)
        wire_bytes = sum(x.nbytes for batch in batches for x in tree_leaves(batch.tasks))
        step = step if self._of_its_order else at
        self.pending[rank] = _Pending(step, totals.detach(), wire_bytes)
        return totals


_served: ServedModel | None = None


def _this_served() -> ServedModel:
    assert _served is not None
    return _served


def _parameters() -> rpc.RRef[Tensor]:
    """Run on the server: a reference to the model's parameters."""
    return rpc.RRef(_this_served().leaf)


@reported
def _forward(rank: int, step: int, batches: list[Batch]) -> Tensor:
    """Run on the server: see `ServedModel.forward`."""
    return _this_served().forward(rank, step, batches)


class HandOver:
    """The optimizer that `DistributedOptimizer` makes on the server: the outer loop's hand."""

    def __init__(self, leaves: list[Tensor], rank: int) -> None:
        self._leaves, self._rank = leaves, rank

    def step(self) -> None:
        """Deliver the gradients of ``rank``'s context, with the sums of its forward."""
        served = _this_served()
        step, totals, wire_bytes = served.pending.pop(self._rank)
        (leaf,) = self._leaves
        if leaf.grad is None:
            raise RuntimeError("the served model got no gradient")
        flat = torch.cat([leaf.grad, totals])
        leaf.grad = None
        served.inbox.deliver(self._rank, Result(step, flat, wire_bytes))


class Caller:
    """On a trainer: the call that trains."""

    def __init__(
        self, worker: Worker, rank: int, guard: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Call from ``rank``; ``guard`` tells whose failure one of the transport's is."""
        self._worker, self._rank, self._guard = worker, rank, guard
        self._optimizer: DistributedOptimizer | None = None

    def __call__(self, order: Order) -> None:
        """Call forward, backward and step for the tasks of ``order``; the result is delivered."""
        batches = list(self._worker.training_tasks(order.ids))
        with self._guard():
            if self._optimizer is None:
                self._optimizer = self._on_server()
            with dist_autograd.context() as context:
                totals = rpc.rpc_sync(0, _forward, (self._rank, order.step, batches))
                dist_autograd.backward(context, [totals[0]])  # type: ignore[attr-defined]
                self._optimizer.step(context)

    def _on_server(self) -> DistributedOptimizer:
        # Here, as it takes every process that imports it 0.7 s, and few need it.
        from torch.distributed.optim import DistributedOptimizer

        # It warns that the optimizer is not compiled; ours only hands over.
        logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
        return DistributedOptimizer(HandOver, [rpc.rpc_sync(0, _parameters)], self._rank)
