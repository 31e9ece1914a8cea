"""The networks, as modules whose batch statistics are explicit.

A network maps ``(x, statistics)`` to ``(outputs, statistics)``: where ``statistics`` is None, every
normalisation uses those of the batch at hand, and returns them; where it is given, they are used
as they are. No running buffer exists, so nothing is shared between tasks, and an evaluator may
normalise a query set with the statistics of the support set.

Shape legend: E examples, C channels, H W pixels, N ways.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Statistics: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""(mean [C], biased variance [C]) of every normalisation, in order of use."""


class BatchNorm(nn.Module):
    """Batch normalisation (arXiv:1502.03167) over ``x [E, C, H, W]`` without running statistics."""

    def __init__(self, channels: int, eps: float = 1e-3) -> None:
        # eps: the default of the layer that MAML's released code uses.
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
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return x * scale[:, None, None] + shift[:, None, None], (mean, variance)


class ConvBlock(nn.Module):
    """3×3 convolution, stride 2, padding 1, bias → batch norm → ReLU: halves H and W."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1)
        nn.init.xavier_uniform_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self.norm = BatchNorm(channels_out)

    def forward(
        self, x: Tensor, given: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return ``[E, channels_out, ⌈H/2⌉, ⌈W/2⌉]`` and the statistics used."""
        x, used = self.norm(self.conv(x), given)
        return F.relu(x), used


class Conv4(nn.Module):
    """MAML's Omniglot network (arXiv:1703.03400, section 5.2): 4 blocks, spatial mean, linear."""

    def __init__(self, channels: int, ways: int, filters: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ConvBlock(channels if i == 0 else filters, filters) for i in range(blocks)
        )
        self.head = nn.Linear(filters, ways)
        nn.init.trunc_normal_(self.head.weight, std=0.01, a=-0.02, b=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        used = []
        for i, block in enumerate(self.blocks):
            x, of_block = block(x, None if statistics is None else statistics[i])
            used.append(of_block)
        return self.head(x.mean(dim=(2, 3))), tuple(used)


class MLP(nn.Module):
    """MAML's regression network (arXiv:1703.03400, section 5.1): two hidden layers of 40, ReLU."""

    def __init__(self, hidden: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            (nn.Linear(1, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1))
        )
        # PyTorch's default initialisation, not the released code's normal with σ = 0.01.

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map ``[E, 1]`` to ``[E, 1]``; there are no statistics."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x), ()


def build_network(name: str, *, channels: int, ways: int) -> nn.Module:
    """Return the network that ``--network name`` means, with weights from the global generator."""
    if name == "conv4":
        return Conv4(channels, ways)
    if name == "mlp":
        return MLP()
    raise ValueError(f"unknown network {name!r}")
