"""Compute tasks in parallel threads, and reuse large blocks of memory.

Shape legend: B tasks, K numbers kept for each.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


def n_threads(n_tasks: int) -> int:
    """Return how many threads compute ``n_tasks``: one for each, but at most torch's number."""
    return max(min(torch.get_num_threads(), n_tasks), 1)


def by_threads(compute: Callable[[int, int, int], T], n_tasks: int) -> list[T]:
    """Return ``compute(thread, first, last)`` for ranges of tasks, one range for each thread.

    A pool keeps the threads from call to call, because each owns working memory of the kernels.
    """
    threads = n_threads(n_tasks)
    bounds = [n_tasks * i // threads for i in range(threads + 1)]
    if threads == 1:
        return [compute(0, 0, n_tasks)]
    others = [_pool(threads).submit(compute, i, *bounds[i : i + 2]) for i in range(1, threads)]
    return [compute(0, *bounds[:2]), *(other.result() for other in others)]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="convnet")


_of_spare = threading.Lock()
_spare: list[np.ndarray] = []
"""Blocks that no tensor uses any more. They are kept because fresh pages cost as much as a small
layer's arithmetic, and threads that touch fresh pages at once wait for each other in the system."""

_LARGE = 1 << 20
"""Only blocks of more bytes are reused here. For smaller blocks we rely on glibc's malloc: when it
frees a block, it learns to keep other blocks of that size."""

_MOST_SPARE = 8
"""How many spare blocks to keep: enough for a few steps."""


def lent(dtype: torch.dtype, n_tasks: int, size: int) -> Tensor:
    """Return uninitialised ``[B, K]``. A large block is reused when no tensor uses it any more."""
    n_bytes = n_tasks * size * dtype.itemsize
    if n_bytes <= _LARGE:
        return torch.empty(n_tasks, size, dtype=dtype)
    block = None
    with _of_spare:
        for i, spare in enumerate(_spare):
            if spare.nbytes == n_bytes:
                block = _spare.pop(i)
                break
        else:
            # Sets of several sizes take turns. After new sizes come, old blocks are not needed.
            del _spare[:-_MOST_SPARE]
    # Torch asks for huge pages where the system has them.
    block = torch.empty(n_bytes, dtype=torch.uint8).numpy() if block is None else block
    part = block[:]
    weakref.finalize(part, _spare.append, block)
    return torch.from_numpy(part).view(dtype).view(n_tasks, size)
