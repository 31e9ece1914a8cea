"""Before anything else: all processes of a run were started with the same flags.

A job script that starts its processes one by one can hand two of them different flags. They would
wait for each other in different transports, or train a mixture without a word.
"""

import contextlib
import dataclasses
import itertools
import json
import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from maml.config import OF_A_HOST, Config, flag
from maml.errors import UserError, WorkerLostError
from maml.processes.store import launchers_store
from maml.processes.world import World

HEAR = 10.0
"""Seconds in which the others hear why rank 0 ends."""

_agreements = itertools.count()


def agree(config: Config, world: World, device: torch.device) -> None:
    """Compare the flags of all processes, through the launcher's store.

    Raises:
        UserError: on rank 0, naming the first rank and flag that differ.
        WorkerLostError: on every other rank then, without a word; and where one does not come, or
            the store is not reached.
    """
    if world.size == 1:
        return
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    if config.strategy == "allreduce":
        # Its collectives are another library's on another kind of device.
        values["device type"] = device.type
    try:
        kept = launchers_store(world)
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        line = str(error).strip().splitlines()[0]
        raise WorkerLostError(f"rank 0 was not reached at {where}: {line}") from error
    try:
        # A prefix of its own: the store outlives a run, of which a process may do several.
        difference = _compare(values, world, PrefixStore(f"flags {next(_agreements)}", kept))
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        who = "rank 0" if world.rank else "a process"
        raise WorkerLostError(f"{who} did not come to the start: {line}") from error
    if difference:
        raise WorkerLostError("", code=2) if world.rank else UserError(difference)


def _compare(values: dict[str, Any], world: World, store: Store) -> str:
    """Return, on every rank, what rank 0 finds different; empty if nothing is."""
    if world.rank:
        store.set(str(world.rank), json.dumps(values))
        difference = store.get("difference").decode()
        store.set(f"{world.rank} has heard", "")
        return difference
    difference = ""
    for rank in range(1, world.size):
        difference = difference or _difference(values, json.loads(store.get(str(rank))), rank)
    store.set("difference", difference)
    if difference:
        # The store may go with this process, which ends now.
        with contextlib.suppress(RuntimeError):
            others = [f"{rank} has heard" for rank in range(1, world.size)]
            store.wait(others, timedelta(seconds=HEAR))
    return difference


def _difference(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> str:
    """Say what is the first difference of ``rank`` from rank 0; nothing if there is none."""
    for name in (name for name in ours if name not in OF_A_HOST and name in theirs):
        if theirs[name] != ours[name]:
            return (
                f"{flag(name)} is {ours[name]} on rank 0 and {theirs[name]} on rank {rank}: "
                "start all processes with the same flags"
            )
    if ours.keys() != theirs.keys():
        return f"rank {rank} runs another version of the program than rank 0"
    return ""
