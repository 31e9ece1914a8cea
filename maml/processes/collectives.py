"""Collectives of all processes, for a run and for a user's own loop: a lost rank ends the wait."""

import contextlib
import math
import platform
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from datasets import accelerator
from maml.processes.liveness import Liveness
from maml.processes.namespaces import in_own_network
from maml.processes.store import START_TIMEOUT, new_room, own_connection
from maml.processes.world import choose_interface

FOR_EVER = timedelta(days=30)
POLL = timedelta(seconds=0.5)
"""A wait for a collective returns to Python after this time: to handle signals, and to see whether
a rank was lost."""


class Collectives:
    """What all processes call in the same order. `Liveness` has the time limits."""

    _between_devices: dist.ProcessGroup | None = None

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def join(self, seconds: float = START_TIMEOUT) -> None:
        """Make torch's process group, by gloo. The processes wait ``seconds`` for each other.

        Raises:
            RuntimeError: if a process does not come.
        """
        world = self._liveness.world
        choose_interface(world)
        in_own_network(dist.init_process_group)(
            "gloo",
            store=own_connection(world, new_room("world"), seconds),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=seconds),
        )
        dist.barrier()
        # Only now, because this limit also applies to the group's creation.
        dist.set_timeout(FOR_EVER, dist.group.WORLD)

    def meet_on(self, device: torch.device) -> None:
        """From here on, let the library of an accelerator, as NCCL, run what is on ``device``.

        It must be an accelerator of this process alone; if that of any process is not, gloo stays.
        """
        place = 0
        if device.type != "cpu":
            place = zlib.crc32(f"{platform.node()} {accelerator.identity(device)}".encode()) + 1
        places = self.of_all([place]).flatten().tolist()
        if 0 in places or len({*places}) < len(places):
            return
        backend = dist.get_default_backend_for_device(device)
        if backend != "gloo":
            with self._liveness.guard():
                made = dist.new_group(backend=backend, timeout=FOR_EVER)
            assert isinstance(made, dist.ProcessGroup)
            self._between_devices = made
            self.together(dist.all_reduce, torch.zeros(1, device=device))

    def together(
        self, collective: Callable[..., Any], tensor: Tensor, *given: Any, limited: bool = True
    ) -> Tensor:
        """Return what a ``collective``, which works in place, makes of a tensor, on its device.

        A process may come late to one that is not ``limited``, by more than the time limit.

        Raises:
            WorkerLostError: naming the rank that does not take part, as far as can be found.
        """
        group = None if tensor.is_cpu else self._between_devices
        moved = tensor
        if group is None:
            moved = tensor.to(device_for(dist.get_backend_config(), tensor.device))
        with self._liveness.guard(limited=limited):
            self._wait(collective(moved, *given, group=group, async_op=True), moved)
        return moved.to(tensor.device)

    def _wait(self, work: dist.Work, of: Tensor) -> None:
        """Wait for a collective; raise RuntimeError if it fails, or never ends: a rank was lost."""
        self._until(work.is_completed, work.wait if of.is_cpu else None)
        work.wait()
        if not of.is_cpu:  # only the device's stream waits
            event = torch.Event(of.device)
            event.record(torch.accelerator.current_stream(of.device))
            self._until(event.query)

    def _until(
        self, is_done: Callable[[], bool], wait: Callable[[timedelta], Any] | None = None
    ) -> None:
        deadline = math.inf
        while not is_done():
            deadline = min(deadline, time.monotonic() + self._liveness.patience())
            if time.monotonic() >= deadline:
                raise RuntimeError("a rank was lost")
            if wait is None:
                time.sleep(0.0005)
                continue
            with contextlib.suppress(RuntimeError):
                wait(POLL)

    def from_rank(self, source: int, content: Any, *, limited: bool = True) -> Any:
        """Return the content that rank ``source`` gives, pickled between processes of one run.

        If it is not ``limited``, the source may come late; see `together`.

        `torch.distributed.broadcast_object_list` does the same, but would wait for a lost rank.
        """
        text, size = c10d._object_to_tensor(content, torch.device("cpu"), dist.group.WORLD)
        size = self.together(dist.broadcast, size, source, limited=limited)
        text = text if dist.get_rank() == source else text.new_empty(int(size))
        text = self.together(dist.broadcast, text, source)
        return c10d._tensor_to_object(text, size, dist.group.WORLD)

    def of_all(self, numbers: list[int]) -> Tensor:
        """Return the ``numbers`` of every rank, ``[ranks, N]`` in int64."""
        of_all = torch.zeros(dist.get_world_size(), len(numbers), dtype=torch.int64)
        of_all[dist.get_rank()] = torch.tensor(numbers)
        return self.together(dist.all_reduce, of_all)


def device_for(backends: str, own: torch.device) -> torch.device:
    """Return the device whose tensors a process group takes: ``own``, if one of its backends does.

    ``backends``: as `torch.distributed.get_backend_config` says it, "cpu:gloo,cuda:nccl".
    """
    kinds = [pair.partition(":")[0] for pair in backends.split(",")]
    if own.type in kinds:
        return own
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
