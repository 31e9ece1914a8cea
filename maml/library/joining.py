"""Join the processes that torchrun has started, and leave them at the end."""

import atexit
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maml.errors import UserError, WorkerLostError
from maml.library import distribution
from maml.processes.board import BEAT
from maml.processes.collectives import Collectives
from maml.processes.launcher import launcher_holds_store, tell_launcher
from maml.processes.liveness import Liveness
from maml.processes.signals import StopRequest
from maml.processes.store import use
from maml.processes.world import World


class OfLoop(Collectives):
    """The collectives of a user's loop: a call that waits for a lost rank raises an error.

    Attributes:
        theirs: Whether the user has initialised the process group, which serves as it is.
    """

    theirs = False

    def meet_on(self, device: torch.device) -> None:
        """See `Collectives.meet_on`."""
        if not self.theirs:
            super().meet_on(device)

    def together(self, *given: Any, **how: Any) -> Tensor:
        """Return what a collective makes of a tensor; see `Collectives.together`."""
        try:
            return super().together(*given, **how)
        except WorkerLostError as lost:
            tell_launcher(f"error: {lost}")
            # Never destroy the group: its destructor would wait for the unfinished collective.
            kept, for_ever = [dist.group.WORLD], threading.Event().wait
            threading.Thread(target=lambda _: for_ever(), args=kept, daemon=True).start()
            raise lost from None


def distributed(timeout: float = 300.0) -> int:
    """Join the processes that torchrun has started, and return this process's rank.

    After this call, a meta-learner computes only its process's share of the tasks. The loss and the
    gradient are means over all tasks. So give every process the same tasks and the same
    meta-learner (others are refused), and do not change the rest of the loop. Without torchrun,
    this function only returns rank 0. A process group that you have initialised serves as it is.

    Args:
        timeout: Seconds that a rank waits for the others. If one does not come, or soon after one
            has ended, the call that waits raises a `WorkerLostError`, which names that rank.

    Raises:
        UserError: for another timeout than a positive number, or an impossible environment.
        WorkerLostError: if another process does not come.
    """
    if not timeout > 0:
        raise UserError(f"timeout {timeout!r}: give seconds, more than 0")
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    initialised = dist.is_initialized()
    if initialised:
        world = World(dist.get_rank(), dist.get_world_size(), 0, on_host, launched=True)
    else:
        world = World.from_environment()
    if distribution.group is not None or world.size == 1:
        return world.rank
    if initialised:
        use(dist.distributed_c10d._get_default_store())
    limit = f"timeout={timeout:g}"
    watch = Liveness(world, timeout, StopRequest(), limit=limit, ends=False)
    group = OfLoop(watch)
    group.theirs = initialised
    watch.watch()
    if not initialised:
        with watch.guard():
            group.join()
    # The threads of a group of ours may else still run when the process ends.
    atexit.register(_leave, watch, destroys=not initialised)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // on_host))
    distribution.group = group
    return world.rank


def _leave(watch: Liveness, destroys: bool) -> None:
    """Leave the other processes at the end of this one, whose error (if any) is in ``sys``."""
    watch.depart(
        f"left after call {distribution.calls}: every rank must make the same calls",
        getattr(sys, "last_value", None),
    )
    if watch.found or (watch.world.rank == 0 and not launcher_holds_store()):
        # This process holds the store, where the others read why it left. Or the others are about
        # to name the lost rank as well, and torchrun ends them soon after this one.
        time.sleep(2 * BEAT)
    # With an unfinished collective, this would wait for ever.
    if destroys and not watch.found and dist.is_initialized():
        dist.destroy_process_group()
