"""``--ps-transport collective``: the synchronous server over broadcast and gather.

The public synchronous parameter servers on torch.distributed work in the same way: rank 0
broadcasts the step and the weights, the others push gradients, and the server sums them.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from maml.config import Config
from maml.params import Params
from maml.processes.world import World
from maml.strategies.collective import Collective
from maml.worker import Share, Worker


class CollectiveServer(Collective):
    """The server on rank 0, and a trainer on each other rank. Tensors are on the CPU."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.drives, self.home = world.rank == 0, torch.device("cpu")
        self.computing = range(1, world.size)

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Broadcast ids and model; return the sum over all trainers' shares."""
        self._announce(torch.tensor(len(ids)))
        self._broadcast(ids)
        self._broadcast(self.packing.params(meta_params))
        shares = self._gather(torch.zeros(self.packing.share_size, dtype=self.worker.dtype))
        return self.packing.to_share(torch.stack(shares[1:]).sum(0))

    def serve(self) -> None:
        """Compute what the server orders, until the server announces that all is done."""
        # Only note a stop signal here: the heartbeat passes it to the server, which decides.
        self.stop.install()
        while n_ids := int(self._announce(torch.tensor(0))):
            ids = self._broadcast(torch.zeros(n_ids, dtype=torch.int64))
            flat = self._broadcast(torch.zeros(self.packing.n_params, dtype=self.worker.dtype))
            mine = ids.tensor_split(self.world.size - 1)[self.world.rank - 1]
            self._gather(self.packed_share(mine, flat))

    def finish(self) -> None:
        """On the server: tell all trainers that all is done."""
        if self.drives:
            self._announce(torch.tensor(0))

    def _announce(self, n_ids: Tensor) -> Tensor:
        """Broadcast the number of the next tasks, 0 at the end. No limit: a test may be long."""
        with self.guard(limited=False):
            self.wait_idly(dist.broadcast(n_ids, src=0, group=self.idle, async_op=True))
        return n_ids

    def _broadcast(self, tensor: Tensor) -> Tensor:
        with self.guard():
            dist.broadcast(tensor, src=0)
        self.wire_bytes += (self.world.size - 1) * tensor.nbytes
        return tensor

    def _gather(self, share: Tensor) -> list[Tensor]:
        """Gather packed shares from all ranks; the list is empty except on rank 0."""
        shares = [torch.empty_like(share) for _ in range(self.world.size)] if self.drives else []
        with self.guard():
            dist.gather(share, shares if self.drives else None, dst=0)
        self.wire_bytes += (self.world.size - 1) * share.nbytes
        return shares
