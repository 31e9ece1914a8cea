"""The global generators of torch, numpy and Python, which all threads of a process share."""

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch

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
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(_gpus()):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def begin(number: int) -> None:
    """Seed the global generators with a number of 63 bits."""
    torch.default_generator.manual_seed(number)
    if _gpus():  # not `torch.manual_seed`, which looks for all kinds of devices: slow
        torch.cuda.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def state() -> int:
    """Return a number that changes with every draw from a global generator."""
    _, words, *others = np.random.get_state()
    of_numpy = np.asarray(words).tobytes(), *others
    of_torch = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        of_torch.append(torch.cuda.get_rng_state())
    return hash((*(each.numpy().tobytes() for each in of_torch), of_numpy, random.getstate()))


def _gpus() -> list[int]:
    """Return the GPU of this process in a list, which is empty if it uses none."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
