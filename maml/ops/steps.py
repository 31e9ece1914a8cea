"""The time steps of a recurrent layer, for rows of sequences that may differ in length.

The rows of all steps stand one after the other, step by step, as in torch's ``PackedSequence``. The
sequences are sorted by length, so a step's rows belong to the first sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """How many rows each step has, and the direction. Tensors are ``[G, rows, …]``."""

    sizes: tuple[int, ...]
    backwards: bool = False

    def order(self) -> list[int]:
        """Return the steps as the layer takes them."""
        return list(range(len(self.sizes)))[:: -1 if self.backwards else 1]

    def of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return each step's part of ``rows [G, N, …]``."""
        return rows.split(self.sizes, 1)

    def join(self, taken: list[Tensor]) -> Tensor:
        """Return what each step of `order` has found, as rows ``[G, N, …]``."""
        return torch.cat(taken[:: -1 if self.backwards else 1], 1)

    def back(self, found: list[Tensor]) -> Tensor:
        """Return what each step has found on the way back, as rows ``[G, N, …]``."""
        return torch.cat(found[:: 1 if self.backwards else -1], 1)


def top(state: Tensor, n: int) -> Tensor:
    """Return the state of the first ``n`` sequences, of ``[G, E, H]``."""
    return state if state.shape[1] == n else state[:, :n]


def put(new: Tensor, state: Tensor) -> Tensor:
    """Return ``state`` with ``new`` as the state of the first sequences."""
    n = new.shape[1]
    return new if n == state.shape[1] else torch.cat([new, state[:, n:]], 1)


def flat(tensors: Iterator[Tensor] | list[Tensor]) -> list[Tensor]:
    """Return tensors ``[…, a, b]`` as ``[G, a, b]``."""
    return [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in tensors]
