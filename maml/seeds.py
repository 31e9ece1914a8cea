"""Seeds for generators that libraries own, from the project's addresses."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from datasets.addresses import keys


def seed_of(seed: int, purpose: str, index: int = 0) -> int:
    """Return the 63-bit seed at the address (seed, purpose, index)."""
    return int(keys(seed, "", purpose, index)[0]) >> 1


@contextlib.contextmanager
def drawn(seed: int, purpose: str) -> Iterator[None]:
    """Let what is drawn inside follow the address (seed, purpose), and nothing outside follow it.

    That is what torch, numpy and Python draw from their global generators, as modules do when they
    are made: so every process makes the same ones.
    """
    number = seed_of(seed, purpose)
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
