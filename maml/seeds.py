"""Seeds for generators that libraries own, from the project's addresses."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from datasets.addresses import keys


def seed_of(seed: int, purpose: str, index: int = 0, split: str = "") -> int:
    """Return the 63-bit seed at the address (seed, split, purpose, index)."""
    return int(keys(seed, split, purpose, index)[0]) >> 1


@contextlib.contextmanager
def drawn(seed: int, purpose: str) -> Iterator[None]:
    """Let what torch, numpy and Python draw inside follow the address (seed, purpose)."""
    with kept():
        begin(seed_of(seed, purpose))
        yield


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave the global generators of torch, numpy and Python as they are, whatever is drawn."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(_gpus()):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def begin(number: int) -> None:
    """Let the global generators begin at a number of 63 bits."""
    torch.default_generator.manual_seed(number)
    if _gpus():  # not `torch.manual_seed`: it asks for all kinds of devices, which takes long
        torch.cuda.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def _gpus() -> list[int]:
    """Return the GPU of this process, where it computes on one."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
