"""Random draws in a loss have an address: the same bits whoever computes it, and when.

What a network's ``forward`` draws from the global generators of torch, numpy and Python, as dropout
does, follows (seed, split, task, support or query, inner step). So a step that is computed again on
the way back draws the same, and so does another process, or a run that goes on.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from maml.seeds import begin, seed_of


class Address(NamedTuple):
    """Where a task's draws come from."""

    seed: int
    split: str
    task: int


NONE = Address(0, "", -1)
"""Of losses that are known not to draw."""


class _Here(threading.local):
    address: Address | None = None


HERE = _Here()
"""The address of the task that this thread computes; None where nobody said it."""


@contextlib.contextmanager
def of_task(address: Address) -> Iterator[None]:
    """Let the losses that this thread calls inside draw by a task's address."""
    before, HERE.address = HERE.address, address
    try:
        yield
    finally:
        HERE.address = before


@contextlib.contextmanager
def at(part: str, step: int) -> Iterator[None]:
    """Let what is drawn inside follow the address of this thread's task at an inner step.

    The global generators are one for all threads, so one thread computes all tasks. They stay as
    they are left: `maml.seeds.kept` is to be around all tasks of a call.
    """
    address = HERE.address
    if address is None or address is NONE:
        yield
        return
    begin(seed_of(address.seed, f"{part} {step}", address.task, address.split))
    yield


def state() -> int:
    """Return a number that changes when anybody draws from a global generator."""
    _, words, place, *_ = np.random.get_state()
    of_numpy = np.asarray(words).tobytes(), place
    of_torch = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        of_torch.append(torch.cuda.get_rng_state())
    return hash((*(each.numpy().tobytes() for each in of_torch), of_numpy, random.getstate()))
