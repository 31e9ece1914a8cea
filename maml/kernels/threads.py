"""Threads that compute tasks side by side, and memory that serves again.

Shape legend: B tasks, K what is kept of each.
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
    """Return how many threads compute so many tasks: as many as torch has, at most."""
    return max(min(torch.get_num_threads(), n_tasks), 1)


def by_threads(compute: Callable[[int, int, int], T], n_tasks: int) -> list[T]:
    """Return ``compute(thread, first, last)`` of ranges of tasks, one for each of torch's threads.

    The threads live on from call to call, and with them the kernels' working memory.
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
"""Blocks that no tensor is of any more: fresh pages cost as much as a small layer's arithmetic, and
threads that touch theirs at once wait for each other in the operating system."""

_LARGE = 1 << 20
"""Bytes that glibc's malloc never keeps (its DEFAULT_MMAP_THRESHOLD_MAX); smaller blocks it does,
and learns from their being freed to keep others."""

_MOST_SPARE = 16
"""Blocks at most: those of some steps."""


def lent(dtype: torch.dtype, n_tasks: int, size: int) -> Tensor:
    """Return uninitialised ``[B, K]``; a large one serves again when no tensor is of it."""
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
            # Sets of several sizes take turns. When others come, these are not asked for again.
            del _spare[: len(_spare) - _MOST_SPARE]
    # Torch asks for huge pages where the system has them.
    block = torch.empty(n_bytes, dtype=torch.uint8).numpy() if block is None else block
    part = block[:]
    weakref.finalize(part, _spare.append, block)
    return torch.from_numpy(part).view(dtype).view(n_tasks, size)
