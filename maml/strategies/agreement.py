"""Before anything else: all processes of a run were started with the same flags.

A job script that starts its processes one by one can hand two of them different flags. They would
wait for each other in different transports, or train a mixture without a word.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from maml.config import Config, flag
from maml.distributed import START_TIMEOUT, World
from maml.errors import UserError, WorkerLostError

OF_A_HOST = ("data_root", "device", "threads", "run_dir", "resume", "logger")
"""Flags that may differ: where a host has its files and devices, and what rank 0 alone reads."""

_agreements = itertools.count()


def agree(config: Config, world: World) -> None:
    """Compare the flags of all processes, through the launcher's store.

    Raises:
        UserError: on rank 0, naming the first rank and flag that differ.
        WorkerLostError: on every other rank then, without a word; on rank 0 if one does not come.
    """
    if not world.launched or world.size == 1:
        return
    try:
        # A prefix of its own: the store outlives a run, of which a process may do several.
        store = PrefixStore(f"flags {next(_agreements)}", _launchers_store(world))
        difference = _compare(config, world, store)
    except RuntimeError as error:
        if world.rank:
            raise WorkerLostError("") from None
        line = str(error).strip().splitlines()[0]
        raise WorkerLostError(f"a process did not come to the start: {line}") from error
    if difference:
        raise WorkerLostError("") if world.rank else UserError(difference)


@functools.cache
def _launchers_store(world: World) -> Store:
    """Connect to the store of ``MASTER_ADDR``; kept, as rank 0 may be the one that holds it."""
    seconds = timedelta(seconds=START_TIMEOUT)
    store: Store
    store, *_ = next(rendezvous("env://", world.rank, world.size, timeout=seconds))
    return store


def _compare(config: Config, world: World, store: Store) -> str:
    """Return, on every rank, what rank 0 finds different; empty if nothing is."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    if world.rank:
        store.set(str(world.rank), json.dumps(values))
        return store.get("difference").decode()
    difference = ""
    for rank in range(1, world.size):
        theirs = json.loads(store.get(str(rank)))
        for name, value in values.items():
            if not difference and name not in OF_A_HOST and theirs[name] != value:
                difference = (
                    f"{flag(name)} is {value} on rank 0 and {theirs[name]} on rank {rank}: "
                    "start all processes with the same flags"
                )
    store.set("difference", difference)
    return difference
