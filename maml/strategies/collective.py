"""The base of strategies over collectives: their process groups, and how they wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from maml.processes.clock import within
from maml.processes.namespaces import in_own_network
from maml.processes.setup import shares_gpu
from maml.processes.store import START_TIMEOUT, new_room, own_connection
from maml.processes.world import choose_interface
from maml.strategies.base import Strategy

FOR_EVER = timedelta(days=30)

POLL = 0.5
"""Seconds after which an idle wait returns to Python, so that Python handles signals."""


class Collective(Strategy):
    """A strategy whose processes call the same collectives in the same order.

    Attributes:
        idle: A process group for CPU tensors without a time limit. There a process waits for work,
            or for rank 0 to finish writing. Wait with `wait_idly`. In the default group,
            nccl waits for ``--timeout``, and gloo for as long as `maml.processes.liveness` allows.
    """

    idle: dist.ProcessGroup

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Join all processes: with gloo between CPUs, with nccl between GPUs of one process each.

        After a body without errors, wait until all are done; if a rank is excused, raise instead.
        After an error, wait for no other process.
        """
        choose_interface(self.world)
        device = self.worker.device
        nccl = device.type == "cuda" and not shares_gpu(self.config, device, self.world)
        start_timeout = timedelta(seconds=max(START_TIMEOUT, self.config.timeout))
        in_own_network(dist.init_process_group)(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=own_connection(self.world, new_room("world"), start_timeout.total_seconds()),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=start_timeout,
        )
        try:
            # Not yet `FOR_EVER`: a group's time limit also applies to its creation.
            idle = in_own_network(dist.new_group)(timeout=start_timeout, backend="gloo")
            # `new_group` returns a number if this process is no member of the group.
            assert isinstance(idle, dist.ProcessGroup)
            self.idle = idle
            dist.barrier()
            # nccl needs a limit: Python cannot end its waits, but its own threads watch them.
            limit = timedelta(seconds=self.config.timeout) if nccl else FOR_EVER
            dist.set_timeout(limit, dist.group.WORLD)
            dist.set_timeout(FOR_EVER, idle)
            yield
            # Rank 0 may still write for a long time. After that, every rank is done or lost.
            self.wait_idly(dist.broadcast(torch.zeros(1), src=0, group=idle, async_op=True))
            # Not a barrier: it may run on nccl, and a process cannot leave nccl's barrier.
            self.wait_idly(dist.all_reduce(torch.zeros(1), group=idle, async_op=True))
        except BaseException:
            within(5.0, dist.destroy_process_group, None)
            raise
        dist.destroy_process_group()

    def wait_idly(self, work: dist.Work | None) -> None:
        """Wait for a collective that rank 0 may begin at any time: ``work`` of ``async_op=True``.

        Raise RuntimeError if it fails, or if it never ends because a process does not take part.
        """
        assert work is not None
        while not self.liveness.dissolved:
            try:
                work.wait(timedelta(seconds=POLL))
                return
            except RuntimeError:
                if work.is_completed():
                    # The collective failed, or completed just after the time limit.
                    work.wait()
                    return
        raise RuntimeError("a process of the collective was lost")
