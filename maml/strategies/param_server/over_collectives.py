"""``--ps-transport collective``: the synchronous server over broadcast and gather.

As in the public synchronous parameter servers on torch.distributed: rank 0 broadcasts the step
and the weights, the others push gradients, the server sums. Every step is three collectives: what
to do, with which model, and the results.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from maml.config import Config
from maml.errors import UserError
from maml.params import Params
from maml.processes.collectives import wait_idly
from maml.processes.world import World
from maml.strategies.collective import Collective
from maml.worker import Share, Worker

FINISH, TRAIN, EVALUATE = range(3)
SPLITS = ("train", "validation", "test")


class CollectiveServer(Collective):
    """The server and, on the other ranks, a trainer. Tensors are on the CPU."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        if world.size < 2:
            raise UserError("--strategy param-server: needs 2 processes: one serves, others train")

    @property
    def drives(self) -> bool:
        """Rank 0 serves, and drives the outer loop."""
        return self.world.rank == 0

    def share_sizes(self) -> set[int]:
        """A trainer's part of every meta-batch; the server computes none."""
        return set() if self.drives else {self.part_size(self.world.rank - 1, self.world.size - 1)}

    # ---- the server -------------------------------------------------------------------------

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Broadcast model and ids; return the sum over all trainers' shares."""
        self._order(TRAIN, ids, meta_params=meta_params)
        shares = self._gather(torch.zeros(self.packing.share_size, dtype=self.worker.dtype))
        return self.packing.to_share(torch.stack(shares[1:]).sum(0))

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Broadcast model and ids; return the rows of all trainers."""
        self._order(EVALUATE, ids, SPLITS.index(split), meta_params)
        rows = self._gather(self._no_rows(len(ids)))
        return torch.cat(
            [part[: len(mine)] for part, mine in zip(rows[1:], self._parts(ids), strict=True)]
        )

    # ---- a trainer --------------------------------------------------------------------------

    def serve(self) -> None:
        """Do what the server orders, until it says that all is done."""
        # A stop signal is the server's business: it hears of one with the next result.
        self.stop.install()
        learner = self.worker.learner
        while True:
            kind, split, n_ids = self._header(torch.zeros(3, dtype=torch.int64)).tolist()
            if kind == FINISH:
                return
            ids = self._broadcast(torch.zeros(n_ids, dtype=torch.int64))
            flat = self._broadcast(torch.zeros(self.packing.n_params, dtype=self.worker.dtype))
            params = self.packing.to_params(flat)
            mine = self._parts(ids)[self.world.rank - 1]
            if kind == TRAIN:
                share = self.worker.share(params, mine, learner)
                self._gather(self.packing.share(share).cpu())
                self.worker.look_ahead(mine)
            else:
                rows = self._no_rows(n_ids)
                rows[: len(mine)] = self.worker.evaluate(params, SPLITS[split], mine, learner)
                self._gather(rows)

    # ---- both -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send everyone home."""
        if self.drives:
            self._order(FINISH, torch.zeros(0, dtype=torch.int64))

    def _order(
        self, kind: int, ids: Tensor, split: int = 0, meta_params: Params | None = None
    ) -> None:
        self._header(torch.tensor([kind, split, len(ids)]))
        if meta_params is not None:
            self._broadcast(ids)
            self._broadcast(self.packing.params(meta_params))

    def _parts(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the ids of each trainer, in the order of ranks."""
        return ids.tensor_split(self.world.size - 1)

    def _no_rows(self, n_ids: int) -> Tensor:
        """Return zeros of the shape in which every rank's rows are gathered."""
        longest = -(-n_ids // (self.world.size - 1))
        return torch.zeros(longest, len(self.worker.evaluation_names), dtype=self.worker.dtype)

    def _header(self, tensor: Tensor) -> Tensor:
        """Broadcast what comes next. There is no time limit: the server may test for minutes."""
        with self.guard(limited=False):
            wait_idly(dist.broadcast(tensor, src=0, group=self.groups.idle, async_op=True))
        self.wire_bytes += (self.world.size - 1) * tensor.nbytes
        return tensor

    def _broadcast(self, tensor: Tensor) -> Tensor:
        with self.guard():
            dist.broadcast(tensor, src=0, group=self.groups.work)
        self.wire_bytes += (self.world.size - 1) * tensor.nbytes
        return tensor

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors of the same shape from all ranks; the list is empty but on rank 0."""
        flat = torch.cat([tensor.reshape(-1), self.stop_flags().to(tensor)])
        parts = [torch.empty_like(flat) for _ in range(self.world.size)] if self.drives else []
        with self.guard():
            dist.gather(flat, parts if self.drives else None, dst=0, group=self.groups.work)
        self.wire_bytes += (self.world.size - 1) * flat.nbytes
        if self.drives:
            stops = torch.stack([part[tensor.numel() :] for part in parts]).sum(0)
            self.stop.signal = self.stop.signal or self.first_stop(stops)
        return [part[: tensor.numel()].view_as(tensor) for part in parts]
