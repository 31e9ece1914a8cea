"""Batch statistics, made explicit: no running buffer is shared between tasks.

Shape legend: E examples, C channels, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

Statistics: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""(mean [C], biased variance [C]) of every normalisation, in order of use."""


EPS = 1e-3
"""The default of the layer that MAML's released code uses."""


class BatchNorm(nn.Module):
    """Batch normalisation (arXiv:1502.03167) over ``x [E, C, H, W]`` without running statistics."""

    def __init__(self, channels: int, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self, x: Tensor, given: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the normalised ``x`` and the (mean, variance) that were used."""
        if given is None:
            variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        else:
            mean, variance = given
        # A tensor, not a number: the forward derivative of "+ number" makes a zero on the CPU.
        eps = variance.new_full((), self.eps)
        scale = self.weight * torch.rsqrt(variance + eps)
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None], (mean, variance)


class InTurn:
    """Hands each normalisation of one forward pass its statistics, in order of use."""

    def __init__(self, given: Statistics | None) -> None:
        self._given: Iterator[tuple[Tensor, Tensor]] | None = None if given is None else iter(given)
        self._used: list[tuple[Tensor, Tensor]] = []

    def __call__(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return ``x`` normalised by ``norm``, a `BatchNorm`."""
        x, used = norm(x, None if self._given is None else next(self._given))
        self._used.append(used)
        return x

    @property
    def used(self) -> Statistics:
        """Those of the normalisations so far."""
        return tuple(self._used)
