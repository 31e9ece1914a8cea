"""What the strategies over torch.distributed's collectives share: their world, and its failures."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from maml.config import Config
from maml.processes.collectives import Groups, collective_world
from maml.processes.setup import init_process, shares_gpu
from maml.processes.signals import SIGNALS
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.strategies.packing import Packing
from maml.worker import Worker


class Collective(Strategy):
    """A strategy whose processes call the same collectives in the same order."""

    groups: Groups

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.packing = Packing(worker.learner.meta_parameters(), len(worker.metric_names))

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Join the process groups."""
        init_process(self.config, self.world)
        shared = shares_gpu(self.config, self.worker.device, self.world)
        with collective_world(
            self.world,
            timeout=self.config.timeout,
            shared_gpu=shared,
            missed=self.liveness.excused,
        ) as self.groups:
            yield

    def stop_flags(self) -> Tensor:
        """Return ``[S]`` float64, which of `SIGNALS` this process has received.

        They travel with its results: a signal may reach one process alone.
        """
        seen = [float(self.stop.signal == number.name) for number in SIGNALS]
        return torch.tensor(seen, dtype=torch.float64)

    @staticmethod
    def first_stop(counts: Tensor) -> str | None:
        """Return the name of the signal that ``counts [S]``, flags added up, say has come."""
        for number, count in zip(SIGNALS, counts.tolist(), strict=True):
            if count:
                return number.name
        return None
