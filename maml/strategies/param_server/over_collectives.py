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
        flat = self.packing.params(meta_params)
        self.group.from_rank(0, (ids, flat), limited=False)
        own = torch.zeros(self.packing.share_size, dtype=self.worker.dtype)
        shares = [torch.empty_like(own) for _ in range(self.world.size)]
        self.group.together(dist.gather, own, shares, 0)
        self.wire_bytes += (self.world.size - 1) * (ids.nbytes + flat.nbytes + own.nbytes)
        return self.packing.to_share(torch.stack(shares[1:]).sum(0))

    def serve(self) -> None:
        """Compute what the server orders, until the server announces that all is done."""
        # Only note a stop signal here: the heartbeat passes it to the server, which decides.
        self.stop.install()
        # No limit: a test before the next order may be long.
        while (order := self.group.from_rank(0, None, limited=False)) is not None:
            ids, flat = order
            mine = ids.tensor_split(self.world.size - 1)[self.world.rank - 1]
            self.group.together(dist.gather, self.packed_share(mine, flat), None, 0)

    def finish(self) -> None:
        """On the server: tell all trainers that all is done."""
        if self.drives:
            self.group.from_rank(0, None, limited=False)
