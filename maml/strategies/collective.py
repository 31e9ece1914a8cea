"""What the strategies over collectives share: their world, and how they wait."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from maml.processes.clock import within
from maml.processes.setup import shares_gpu
from maml.processes.store import START_TIMEOUT, new_room, own_connection
from maml.processes.world import choose_interface
from maml.strategies.base import Strategy

FOR_EVER = timedelta(days=30)

POLL = 0.5
"""Seconds after which a process that waits idly looks around for signals."""


class Collective(Strategy):
    """A strategy whose processes call the same collectives in the same order.

    Attributes:
        idle: A process group of CPU tensors without a time limit; where a process waits for work,
            or for rank zero to finish writing. Wait there with `wait_idly`. In the default group,
            nccl waits for ``--timeout``, and gloo for as long as `maml.processes.liveness` allows.
    """

    idle: dist.ProcessGroup

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Join all: gloo between CPUs, nccl between GPUs of one process each.

        A body that ends well leaves when all are done, but those that were excused; one that ends
        in an error waits for nobody.
        """
        choose_interface(self.world)
        nccl = torch.cuda.is_available() and not shares_gpu(
            self.config, self.worker.device, self.world
        )
        start_timeout = timedelta(seconds=max(START_TIMEOUT, self.config.timeout))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=own_connection(self.world, new_room("world"), start_timeout.total_seconds()),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=start_timeout,
        )
        try:
            # Not yet with its own patience: a group's time limit is also that of its making.
            idle = dist.new_group(timeout=start_timeout, backend="gloo")
            # It returns a number in place of a group of which this process is no member.
            assert isinstance(idle, dist.ProcessGroup)
            self.idle = idle
            dist.barrier()
            # nccl's waits are not Python's: its own threads watch over what it has begun.
            limit = timedelta(seconds=self.config.timeout) if nccl else FOR_EVER
            dist.set_timeout(limit, dist.group.WORLD)
            dist.set_timeout(FOR_EVER, idle)
            yield
            # Rank zero may still write for long; once it is done, so is everyone, or is lost.
            wait_idly(dist.broadcast(torch.zeros(1), src=0, group=idle, async_op=True))
            # Not a barrier, which would be nccl's: it cannot be left.
            done = dist.all_reduce(torch.zeros(1), group=idle, async_op=True)
            wait_idly(done, self.liveness.excused)
        except BaseException:
            within(5.0, dist.destroy_process_group, None)
            raise
        dist.destroy_process_group()


def wait_idly(work: dist.Work | None, missed: Collection[int] = ()) -> None:
    """Wait for a collective that rank zero begins when it pleases: ``work`` of ``async_op=True``.

    Raise RuntimeError as it does, or once there are ``missed`` ranks, without which it never ends.
    """
    assert work is not None
    while not missed:
        try:
            work.wait(timedelta(seconds=POLL))
            return
        except RuntimeError:
            if work.is_completed():
                # It has failed, or was done just after the time was up.
                work.wait()
                return
    raise RuntimeError("one that takes part is gone")
