"""The global generators of torch, numpy and Python, which all threads of a process share."""

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from datasets import accelerator
from datasets.addresses import keys

LOCK = threading.RLock()
"""Hold this lock from the saving of the generators to their restoring."""


def seed_of(seed: int, purpose: str, index: int = 0, split: str = "") -> int:
    """Return the 63-bit seed at the address (seed, split, purpose, index)."""
    return int(keys(seed, split, purpose, index)[0]) >> 1


@contextlib.contextmanager
def drawn(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch, numpy and Python by the address (seed, purpose) inside the context."""
    with kept():
        begin(seed_of(seed, purpose))
        yield


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the global generators of torch, numpy and Python when the context ends."""
    of_numpy, of_python, of_torch = np.random.get_state(), random.getstate(), _of_torch()
    try:
        yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        torch.set_rng_state(of_torch[0])
        for i, words in enumerate(of_torch[1:]):
            torch.get_device_module().set_rng_state(words, i)


def begin(number: int) -> None:
    """Seed the global generators with a number of 63 bits."""
    torch.default_generator.manual_seed(number)
    if used := accelerator.in_use():  # not `torch.manual_seed`, which looks for all kinds: slow
        used.manual_seed_all(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def state() -> int:
    """Return a number that changes with every draw from a global generator."""
    _, words, *others = np.random.get_state()
    of_numpy = np.asarray(words).tobytes(), *others
    return hash((*(each.numpy().tobytes() for each in _of_torch()), of_numpy, random.getstate()))


def _of_torch() -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, and that of each accelerator in use.

    Of all accelerators, because a thread computes on another than its current one.
    """
    found = [torch.get_rng_state()]
    if used := accelerator.in_use():
        found += map(used.get_rng_state, range(used.device_count()))
    return found
