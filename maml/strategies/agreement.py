"""Before anything else: all processes of a run were started with the same flags.

A job script that starts its processes one by one can hand two of them different flags. They would
wait for each other in different transports, or train a mixture without a word.
"""

import dataclasses
import itertools
import os
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from maml.config import OF_A_HOST, Config, flag
from maml.errors import UserError, WorkerLostError
from maml.processes.store import exchange, launchers_store
from maml.processes.world import World

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
    values = dataclasses.asdict(config)
    if config.strategy == "allreduce":
        # Its collectives are another library's on another kind of device.
        values["device type"] = device.type
    try:
        # A prefix of its own: the store outlives a run, of which a process may do several.
        store = PrefixStore(f"flags {next(_agreements)}", launchers_store(world))
        ours, *others = exchange(store, world, values)
    except (RuntimeError, ValueError) as error:
        who = "rank 0" if world.rank else "another process"
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        line = str(error).strip().splitlines()[0]
        raise WorkerLostError(f"{who} did not come to the start at {where}: {line}") from error
    for rank, theirs in enumerate(others, 1):
        if difference := _difference(ours, theirs, rank):
            raise WorkerLostError("", code=2) if world.rank else UserError(difference)


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
