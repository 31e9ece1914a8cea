"""Collectives between all processes of a run: their beginning and their end."""

import contextlib
import itertools
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from maml.processes.finding import within
from maml.processes.interface import choose_interface
from maml.processes.store import START_TIMEOUT, own_connection
from maml.processes.world import World


class Groups(NamedTuple):
    """Process groups over the same processes, which differ in how long nccl waits.

    ``work``: for ``--timeout``. ``idle``: for ever; where a process waits for work, or for rank
    zero to finish writing. Wait there with `wait_idly`. In both, gloo waits for as long as
    `maml.processes.liveness` allows.
    """

    work: dist.ProcessGroup
    idle: dist.ProcessGroup


FOR_EVER = timedelta(days=30)

POLL = 0.5
"""Seconds after which a process that waits idly looks around for signals."""

_worlds = itertools.count()
"""A process may do several runs, one after the other; the launcher's store outlives them all."""


def wait_idly(work: dist.Work | None, missed: Collection[int] = ()) -> None:
    """Wait for a collective that rank zero begins when it pleases.

    Args:
        work: What ``async_op=True`` returned.
        missed: Ranks without which it cannot be done; there may be some later.

    Raises:
        RuntimeError: as ``work`` does, or if one is missed.
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


@contextlib.contextmanager
def collective_world(
    world: World, *, timeout: float, shared_gpu: bool = False, missed: Collection[int] = ()
) -> Iterator[Groups]:
    """Join all processes for collectives: gloo between CPUs, nccl between GPUs of one process each.

    A body that ends well leaves when all are done, but those ``missed``; one that ends in an error
    waits for nobody.
    """
    choose_interface(world)
    nccl = torch.cuda.is_available() and not shared_gpu
    start_timeout = timedelta(seconds=max(START_TIMEOUT, timeout))
    store: Store
    if world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store = own_connection(world, start_timeout.total_seconds())
    store = PrefixStore(f"collective world {next(_worlds)}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=start_timeout,
    )
    try:
        # Not yet with their own patience: a group's time limit is also that of its making.
        work = dist.new_group(timeout=start_timeout)
        idle = dist.new_group(timeout=start_timeout)
        # It returns a number in place of a group of which this process is no member.
        assert isinstance(work, dist.ProcessGroup)
        assert isinstance(idle, dist.ProcessGroup)
        groups = Groups(work, idle)
        dist.barrier()
        # nccl's waits are not Python's: its own threads watch over what it has begun.
        dist.set_timeout(timedelta(seconds=timeout) if nccl else FOR_EVER, work)
        dist.set_timeout(FOR_EVER, idle)
        yield groups
        # Rank zero may still write for long; once it is done, so is everyone, or is lost.
        wait_idly(dist.broadcast(torch.zeros(1), src=0, group=groups.idle, async_op=True))
        # Not a barrier, which would be nccl's: it cannot be left.
        wait_idly(dist.all_reduce(torch.zeros(1), group=groups.idle, async_op=True), missed)
    except BaseException:
        within(5.0, dist.destroy_process_group, None)
        raise
    dist.destroy_process_group()
