"""What a process sets once: its title, warnings, computing threads, generators."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import setproctitle
import torch

from maml.config import Config
from maml.processes.world import World
from maml.seeds import seed_of

UPSTREAM = (
    # TorchOpt's Adam and its kin, batched over tasks.
    "There is a performance drop because we have not yet implemented the batching rule",
    # torch's own forward derivatives, as they are imported.
    "`torch.jit.script` is deprecated",
)
"""How warnings begin that libraries give about themselves, and that no flag of ours can heed."""


def init_process(config: Config, world: World) -> None:
    """Set title, warnings, computing threads and the global generators of this process.

    The generators are seeded by *global* rank, so that no two processes of a run share a stream.
    No result depends on them: all that matters for one has an address of its own.
    """
    for message in UPSTREAM:
        warnings.filterwarnings("ignore", message=message)
    setproctitle.setproctitle(f"maml[{world.rank}/{world.size}] {config.preset}")
    threads = config.threads
    if (threads is None and "OMP_NUM_THREADS" not in os.environ) or world.launched:
        # torchrun sets OMP_NUM_THREADS=1 whatever the machine: share its cores out instead.
        threads = threads or max(1, len(os.sched_getaffinity(0)) // world.local_size)
    if threads is not None:
        torch.set_num_threads(threads)
    seed = seed_of(config.seed, "process", world.rank)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Exempt what exists before the loop from garbage collection.

    Modules and data sets are a million objects, which stay; to walk through them takes a tenth of
    a second, and every process that is waited for does it at another time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
