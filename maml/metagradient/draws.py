"""Random draws in a loss have an address: every process draws the same bits at any time.

A network's ``forward`` may draw from the global generators of torch, numpy and Python, as dropout
does. The address (seed, split, task, support or query, inner step) determines these draws. So they
are the same in another process, in a resumed run, and in a step recomputed on the way back.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from datasets.generators import LOCK, begin, seed_of


class Address(NamedTuple):
    """What determines a task's draws; `at` adds support or query, and the inner step."""

    seed: int
    split: str
    task: int


NONE = Address(0, "", -1)
"""The address of losses that are known not to draw."""


class _Here(threading.local):
    address: Address | None = None


HERE = _Here()
"""The address of the task that this thread computes; None if not set."""


@contextlib.contextmanager
def of_task(address: Address) -> Iterator[None]:
    """Within this context, let this thread's losses draw by a task's address."""
    before, HERE.address = HERE.address, address
    try:
        yield
    finally:
        HERE.address = before


def alone() -> AbstractContextManager[object]:
    """Return a re-entrant context in which no other thread draws, or makes a task that draws.

    A thread that computes a task does not wait: the thread that shares out the tasks waits for it.
    """
    return LOCK if HERE.address is None else contextlib.nullcontext()


@contextlib.contextmanager
def at(part: str, step: int) -> Iterator[None]:
    """Within this context, draw by the address of this thread's task at an inner step.

    All threads share the global generators, so one thread computes all tasks. This context does
    not restore the generators: put `kept` around all tasks of a call.
    """
    address = HERE.address
    if address is not None and address is not NONE:
        begin(seed_of(address.seed, f"{part} {step}", address.task, address.split))
    yield
