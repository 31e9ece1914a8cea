"""Tasks shared out to threads: each thread computes whole tasks with its share of the cores.

A call puts parameters into the network, so each thread calls its own copy of the network. All
copies share the memory of their tensors. Results come in the order of the tasks.
"""

import contextlib
import contextvars
import functools
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from maml.execution.copies import closed_copy, own_hooks

T = TypeVar("T")
Item = TypeVar("Item")
M = TypeVar("M", bound=nn.Module)


AHEAD = 2
"""Items per thread to submit before the caller takes the oldest result: this bounds memory."""


def spread(
    owner: M,
    function: Callable[[M, Item], T],
    items: Sequence[Item],
    *,
    alone: bool = False,
    several: bool = True,
    in_turn: bool = False,
    copying: AbstractContextManager[object] | None = None,
) -> Iterator[T]:
    """Yield ``function(owner, item)`` of each item, computed in as many threads as torch has.

    With several threads, the function gets a copy of ``owner`` and may change only this copy.
    ``alone``: one thread with one core computes all items, because each draw depends on the draws
    before. Without ``several``, one thread with all cores computes them. ``in_turn``: one thread
    computes them on the owner, with the cores that each of several threads would have, and so the
    same bits. ``copying`` is held only while the owner is copied: the function may need it.
    """
    # Autocast and the default device are settings of the calling thread only. Tasks on a GPU would
    # share it, so one thread computes them.
    read = [*owner.parameters(), *pytree.tree_leaves(items[:1])]
    devices = {torch.get_default_device().type}
    devices |= {part.device.type for part in read if isinstance(part, Tensor)}
    several &= not alone and devices == {"cpu"} and not torch.is_autocast_enabled("cpu")
    n_threads = min(torch.get_num_threads(), len(items)) if several else 1
    with copying or contextlib.nullcontext():
        copies = _copies(owner, n_threads) if n_threads > 1 else []
    cores = 1 if alone else torch.get_num_threads() // (n_threads if copies else 1)
    if not copies or in_turn:
        with _cores_each(cores):
            yield from (function(owner, item) for item in items)
        return
    free: queue.SimpleQueue[M] = queue.SimpleQueue()
    for own in copies:
        free.put(own)

    def one(item: Item) -> T:
        own = free.get()
        try:
            return function(own, item)
        finally:
            free.put(own)

    waiting: deque[Future[T]] = deque()
    with _cores_each(cores):
        try:
            for item in items:
                run = contextvars.copy_context().run  # with the caller's context variables
                waiting.append(_pool(n_threads, cores).submit(run, one, item))
                if len(waiting) > AHEAD * n_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)


def _copies(owner: M, count: int) -> list[M]:
    """Return copies that share all tensors, or an empty list if the owner cannot be copied.

    Hooks that are no methods of a module are not copied, so the threads would share what they keep.
    Threads also share the cache of parametrizations (`torch.nn.utils.parametrize.cached`).
    """
    cached = map(parametrize.is_parametrized, owner.modules())
    if any(map(own_hooks, owner.modules())) or any(cached):
        return []
    copies = [copied(owner) for _ in range(count)]
    return [own for own in copies if own is not None]


def copied(owner: M) -> M | None:
    """Return a copy that shares all tensors; None if the owner cannot be copied."""
    try:
        return closed_copy(owner, {})
    except Exception:
        return None


@contextlib.contextmanager
def _cores_each(cores: int) -> Iterator[None]:
    """Let every operation inside use ``cores`` cores: torch's libraries share one setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _pool(n_threads: int, cores: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        n_threads, "tasks of a batch", initializer=torch.set_num_threads, initargs=(cores,)
    )
