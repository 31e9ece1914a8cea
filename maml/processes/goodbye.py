"""How the processes of a run part: rank zero last, and nobody held up."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore

from maml.processes.store import launchers_store
from maml.processes.world import World

GOODBYE = 10.0
"""Seconds that rank zero waits for the others at most, once all is done."""


_departures = itertools.count()
"""A process may do several runs, one after the other; the launcher's store outlives them all."""


def let_rank_zero_be_last(world: World, timeout: float, missed: Collection[int] = ()) -> None:
    """On rank zero wait until the others, but those ``missed``, have left; there, say so.

    Where no launcher holds the store, rank zero does, and it goes with its process: leaving RPC,
    a slower peer then failed at the very end. One that does not come is not waited for longer
    than ``timeout`` or `GOODBYE` seconds; all is done, and it is no error.
    """
    if world.size == 1:
        return
    store = PrefixStore(f"departure {next(_departures)}", launchers_store(world))
    with contextlib.suppress(RuntimeError):
        if world.rank:
            store.set(str(world.rank), "left")
        else:
            others = [str(rank) for rank in range(1, world.size) if rank not in missed]
            store.wait(others, timedelta(seconds=min(timeout, GOODBYE)))


def without_waiting(close: Callable[[], object], seconds: float = 5.0) -> None:
    """Close this process's end of a transport; not even that may hold the process up."""
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(seconds)
