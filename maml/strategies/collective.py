"""The base of strategies over collectives: how their processes join and part."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from maml.config import Config
from maml.processes.clock import within
from maml.processes.collectives import Collectives
from maml.processes.store import START_TIMEOUT
from maml.processes.world import World
from maml.strategies.base import Strategy
from maml.worker import Worker


class Collective(Strategy):
    """A strategy whose processes call the same collectives, those of ``group``, in one order."""

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.group = Collectives(self.liveness)

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Join all processes: with gloo, and between GPUs of one process each with NCCL, say.

        After a body without errors, wait until all are done; if a rank is excused, raise instead.
        After an error, wait for no other process.
        """
        self.group.join(max(START_TIMEOUT, self.config.timeout))
        self.group.meet_on(self.home)
        try:
            yield
            # Rank 0 may still write for a long time. After that, every rank is done or lost.
            self.group.together(dist.broadcast, torch.zeros(1), 0, limited=False)
            self.group.together(dist.all_reduce, torch.zeros(1), limited=False)
        except BaseException:
            within(5.0, dist.destroy_process_group, None)
            raise
        dist.destroy_process_group()
