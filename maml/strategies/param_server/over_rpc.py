"""``--strategy param-server`` over RPC: rank 0 serves, the others train.

One RPC pushes a gradient and returns the next order with the updated model (`OverRpc`). The modes
differ only in whose gradients a step waits for, and in which tasks an order has. The outer loop
chooses when to step, as for every strategy.
"""

import functools
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from maml.config import Config
from maml.errors import UserError
from maml.params import Params
from maml.processes.world import World
from maml.strategies.over_rpc import Order, OverRpc
from maml.worker import Share, Worker


class ParameterServer(OverRpc):
    """The server on rank 0, and a trainer on each other rank.

    Modes (``--ps-mode``): sync sums the gradients of all trainers. backup sums the first n − b
    gradients that arrive. async returns each gradient as it arrives, unless it is too old. A share
    carries the count of its tasks. So the outer loop divides by the number of tasks that were
    really summed.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.is_async = config.ps_mode == "async"
        self.spared = config.ps_backup_workers if config.ps_mode == "backup" else 0
        if self.spared >= len(self.others):
            raise UserError(
                f"--ps-backup-workers {self.spared}: a step would wait for none of the "
                f"{len(self.others)} trainers"
            )
        self.computing = self.others
        self.oldest = config.ps_max_staleness if self.is_async else 0
        # The first task of the next meta-batch to hand out, in async mode.
        self._next_task: int | None = None
        self._taken_in = torch.empty(0, dtype=torch.int64)
        self._busy = 0.0

    def part_size(self, rank: int) -> int:
        """Return the size of a trainer's part: in async mode, a whole meta-batch."""
        return self.config.meta_batch_size if self.is_async else super().part_size(rank)

    def counts(self, rank: int) -> bool:
        """Return whether a lost trainer counts: in backup mode, only one with tasks does."""
        return self.config.ps_mode != "backup" or self.part_size(rank) > 0

    def publish(self, meta_params: Params) -> Tensor:
        """Begin a step with this model; return the ``params`` of its orders."""
        return self.packing.params(meta_params)

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Order gradients of this model; return the sum of those that this mode waits for.

        In async mode each trainer gets a whole meta-batch, so that a step is the mean over as many
        tasks as in every other mode.
        """
        began, self.waited = time.monotonic(), 0.0
        params = self.publish(meta_params)
        parts = dict(zip(self.others, ids.tensor_split(len(self.others)), strict=True))
        # With fewer tasks than trainers, some trainers get no order, and we do not wait for them.
        parts = {rank: part for rank, part in parts.items() if len(part)}
        wait_for = 1 if self.is_async else max(len(parts) - self.spared, 1)

        def order_for(rank: int) -> Order | None:
            tasks = self._next_batch(ids) if self.is_async else parts.pop(rank, None)
            return None if tasks is None else (type(self).compute, tasks, params)

        results = self.collect(order_for, lambda results: len(results) >= wait_for, self.oldest)
        self._taken_in = torch.cat([tasks for (_, tasks, _), _ in results.values()])
        # Sum in the order of ranks, not of arrival, so that a repeated run has the same bits.
        flat = functools.reduce(torch.add, (share for _, share in results.values()))
        self._busy += time.monotonic() - began - self.waited
        return self.packing.to_share(flat)

    def _next_batch(self, ids: Tensor) -> Tensor:
        """Return the next meta-batch, from the run's first step ``ids`` on (`Episodes.ids`)."""
        first = int(ids[0]) if self._next_task is None else self._next_task
        self._next_task = first + len(ids)
        return ids - ids[0] + first

    def tasks_of_step(self, ids: Tensor) -> Tensor:
        """Return the ids of the gradients that this step took in."""
        return self._taken_in

    def report(self) -> dict[str, Any]:
        """Return bytes, the server's busy seconds, dropped gradients, and staleness by age."""
        row = super().report() | {"server_seconds": self._busy}
        ages, self.ages, self._busy = self.ages, Counter(), 0.0
        if self.config.ps_mode != "sync":
            row["dropped"] = sum(count for age, count in ages.items() if age > self.oldest)
        if self.is_async:
            most = max((age for age in ages if age <= self.oldest), default=0)
            row["staleness"] = [ages[age] for age in range(most + 1)]
        return row

    def compute(self, ids: Tensor, params: Tensor) -> Tensor | None:
        """On a trainer: return the packed share of the tasks ``ids``; None if it is delivered."""
        return self.packed_share(ids, params)
