"""Set up a process once: device, title, warnings, computing threads and random generators."""

import os
import random
import resource
import warnings

import numpy as np
import setproctitle
import torch

from datasets import accelerator
from datasets.generators import seed_of
from maml.config import Config
from maml.errors import UserError
from maml.processes.world import World

UPSTREAM = (
    # TorchOpt's Adam and similar optimizers, batched over tasks.
    "There is a performance drop because we have not yet implemented the batching rule",
    # torch's own forward derivatives, when they are imported.
    "`torch.jit.script` is deprecated",
    # torch's initialisation of RPC, of its own call.
    "You are using a Backend",
)
"""Beginnings of warnings that libraries give about themselves. No flag of ours avoids them."""


def init_process(config: Config, world: World) -> None:
    """Set title, warnings, computing threads and the global generators of this process.

    The generators are seeded by *global* rank, so that no two processes of a run share a stream.
    No result depends on them: draws that matter for a result have their own seed addresses.
    `UserError`: the process may open too few files to connect to the others.
    """
    _check_open_files(world)
    for message in UPSTREAM:
        warnings.filterwarnings("ignore", message=message)
    setproctitle.setproctitle(f"maml[{world.rank}/{world.size}] {config.preset}")
    threads = config.threads
    if (threads is None and "OMP_NUM_THREADS" not in os.environ) or world.launched:
        # torchrun sets OMP_NUM_THREADS=1 on every machine. Divide the machine's cores instead.
        threads = threads or max(1, len(os.sched_getaffinity(0)) // world.local_size)
    if threads is not None:
        torch.set_num_threads(threads)
    seed = seed_of(config.seed, "process", world.rank)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_open_files(world: World) -> None:
    """Raise `UserError` if the limit of open files is too low: transports would wait in silence."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 24 + 8 * world.size
    if world.size > 1 and limit != resource.RLIM_INFINITY and limit < least:
        raise UserError(
            f"ulimit -n {limit}: {world.size} processes need at least {least} open files and "
            "connections each (RLIMIT_NOFILE); raise it"
        )


def choose_device(config: Config, world: World) -> torch.device:
    """Return the device of ``--device``; raise `UserError` if it is not there."""
    name, here = config.device, accelerator.kind()
    try:
        device = torch.device(here or "cpu" if name == "auto" else name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device (cpu, cuda, cuda:N or auto)") from None
    if device.type == "cpu":
        return device
    if device.type != here:
        there = f"its accelerator is {here}" if here else "it has no usable GPU"
        raise UserError(f"--device {name}: not on this machine: {there}")
    count = torch.accelerator.device_count()
    if device.index is None:
        device = torch.device(device.type, world.local_rank % count)
    elif device.index >= count:
        raise UserError(f"--device {name}: there are only {count} GPUs")
    return device
