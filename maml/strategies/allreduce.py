"""``--strategy allreduce``: every rank computes its share and takes the same step.

Use this strategy for many GPUs and hosts. A step is one flat all-reduce of [Σ gradient, Σ metrics,
count] for any number of tasks. Only the start is broadcast. All ranks hold the same parameters
because they do the same arithmetic; a check compares the parameters every ``--check-every`` steps.
"""

import hashlib
import time
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from maml.config import Config
from maml.errors import DivergedError
from maml.params import Params
from maml.processes.signals import SIGNALS
from maml.processes.world import World
from maml.strategies.collective import Collective
from maml.worker import Share, Worker

COMPONENTS = {
    "allreduce": {
        "attribute": "AllReduce",
        "help": "all processes take the same step; one flat all-reduce (gloo, nccl)",
        "reads": ("check_every",),
    }
}


T = TypeVar("T")


class AllReduce(Collective):
    """All ranks drive; `Tensor.tensor_split` gives each rank its part of the ids."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self._steps, self._reduce_seconds = 0, 0.0
        self._agreed: str | None = None

    @property
    def stopping(self) -> str | None:
        """Return the signal that any rank had received by the latest collective."""
        return self._agreed

    def from_rank_zero(self, value: T) -> T:
        """Broadcast ``value``."""
        received: T = self.group.from_rank(0, value)
        return received

    def meta_step(self, meta_params: Params, ids: Tensor) -> Share:
        """Differentiate this rank's part of ``ids``; sum over ranks."""
        every = self.config.check_every
        if every and self._steps % every == 0:
            self._check_equal(meta_params)
        self._steps += 1
        mine = ids.tensor_split(self.world.size)[self.world.rank]
        share = self.worker.share(meta_params, mine, self.worker.learner)
        return self.packing.to_share(self._reduce(self.packing.share(share)), len(ids))

    def evaluate(self, meta_params: Params, split: str, ids: Tensor) -> Tensor:
        """Evaluate this rank's part of ``ids``; every rank gets all rows."""
        if self.config.check_every:
            self._check_equal(meta_params)
        mine = torch.arange(len(ids)).tensor_split(self.world.size)[self.world.rank]
        found = self.worker.evaluate(meta_params, split, ids[mine])
        rows = torch.zeros(len(ids), found.shape[1], dtype=self.worker.dtype, device=self.home)
        rows[mine] = found.to(self.home)
        return self._reduce(rows.reshape(-1)).view_as(rows).cpu()

    def _reduce(self, flat: Tensor) -> Tensor:
        """Sum over ranks, and agree on whether to stop: a signal may reach only one rank."""
        began = time.perf_counter()
        stops = flat.new_zeros(len(SIGNALS))
        for i, number in enumerate(SIGNALS):
            if self.stop.signal == number.name:
                stops[i] = 1.0
        both = self.group.together(dist.all_reduce, torch.cat([flat, stops]))
        stops_of_all = both[len(flat) :].tolist()
        self._reduce_seconds += time.perf_counter() - began
        # In a ring, each of the n ranks sends 2 (n - 1) / n of the tensor.
        self.wire_bytes += 2 * (self.world.size - 1) * both.nbytes
        for number, count in zip(SIGNALS, stops_of_all, strict=True):
            if count:
                self._agreed = self._agreed or number.name
        return both[: len(flat)]

    def report(self) -> dict[str, Any]:
        """Return bytes and the seconds of all-reduces: transfer, and wait for the slowest rank."""
        seconds, self._reduce_seconds = self._reduce_seconds, 0.0
        return super().report() | {"reduce_seconds": seconds}

    def _check_equal(self, meta_params: Params) -> None:
        """Raise `DivergedError` on all ranks if a rank differs from rank 0 in any parameter bit."""
        flat = self.packing.params(meta_params).cpu()
        digest = hashlib.blake2b(flat.numpy().tobytes()).digest()
        digests = self.group.of_all(np.frombuffer(digest, np.int64).tolist())
        if others := (digests != digests[0]).any(1).nonzero().flatten().tolist():
            hold = "rank {} holds" if len(others) == 1 else "ranks {} hold"
            who = hold.format(", ".join(map(str, others)))
            raise DivergedError(f"{who} other parameters than rank 0")
