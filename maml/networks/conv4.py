"""MAML's networks, as modules whose batch statistics are explicit.

A network, whose output layer's parameters have names that begin with its ``head_prefix``, maps
``(x, statistics)`` to ``(outputs, statistics)``: where ``statistics`` is None, every
normalisation uses those of the batch at hand, and returns them; where it is given, they are used
as they are. No running buffer exists, so nothing is shared between tasks, and an evaluator may
normalise a query set with the statistics of the support set.

Shape legend: E examples, C channels, H W pixels, N ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from datasets.flags import flag
from maml.errors import UserError
from maml.networks.statistics import EPS, BatchNorm, Statistics

COMPONENTS = {
    "conv4": {
        "attribute": "Conv4",
        "help": "four strided blocks, spatial mean",
        "options": {"pool": False, "mean": True},
    },
    "conv4-flat": {
        "attribute": "Conv4",
        "help": "four strided blocks, flattened",
        "options": {"pool": False, "mean": False},
    },
    "conv4-pool": {
        "attribute": "Conv4",
        "help": "four blocks with max-pools, flattened",
        "options": {"pool": True, "mean": False},
    },
}


class Flags:
    """What the components of this file read, and no other."""

    filters: int = flag(
        64,
        "Channels of each of the network's convolutions; compiled kernels need a multiple of the "
        "processor's vector: 8, or 16 with AVX-512 (in float64 of half of that).",
        least=1,
    )
    leak: float = flag(
        0.0,
        "Slope of the networks' activations below zero: 0 is ReLU, MAML++'s leaky ReLU has 0.01.",
        least=0,
        below=1,
    )
    norm_eps: float = flag(1e-3, "Added to the variance by batch normalisation.", above=0)
    head_init: Literal["small", "normal", "xavier"] = flag(
        "small",
        "Initial weights of the output layer: normal with σ 0.01, N(0, 1), or Xavier's uniform.",
    )


HEAD_INITS: dict[str, Callable[[Tensor], object]] = {
    "small": lambda weight: nn.init.trunc_normal_(weight, std=0.01, a=-0.02, b=0.02),
    "normal": nn.init.normal_,
    "xavier": nn.init.xavier_uniform_,
}
"""How the output layer's weights begin: ``--head-init``."""


class ConvBlock(nn.Module):
    """3×3 convolution, padding 1, bias → batch norm → (leaky) ReLU → 2×2 max-pool or none.

    Halves H and W either way: by a stride of 2 (rounded up), or by the pooling (rounded down).
    """

    def __init__(
        self, channels_in: int, channels_out: int, *, pool: bool, leak: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.pool, self.leak = pool, leak
        self.conv = nn.Conv2d(channels_in, channels_out, 3, stride=1 if pool else 2, padding=1)
        nn.init.xavier_uniform_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self.norm = BatchNorm(channels_out, norm_eps)

    def forward(
        self, x: Tensor, given: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return ``[E, channels_out, H/2, W/2]`` and the statistics used."""
        x, used = self.norm(self.conv(x), given)
        x = F.leaky_relu(x, self.leak) if self.leak else F.relu(x)
        return F.max_pool2d(x, 2) if self.pool else x, used


class Conv4(nn.Module):
    """MAML's convolutional networks (arXiv:1703.03400, section 5.2): four blocks and a linear head.

    Omniglot's has strided blocks of 64 filters and a spatial mean before the head;
    MiniImageNet's has pooled blocks of 32 filters, whose outputs the head sees flattened.
    Reptile's and iMAML's for Omniglot have strided blocks, flattened. ``mean`` None: unless pooled.
    """

    blocks_n = 4
    head_prefix = "head."
    """What the names of the output layer's parameters begin with."""
    context_layer = "blocks.2.norm"
    """The layer that a context modulates (arXiv:1810.03642, appendix)."""

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        ways: int,
        *,
        filters: int,
        pool: bool,
        mean: bool | None = None,
        leak: float = 0.0,
        norm_eps: float = EPS,
        head_init: str = "small",
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        if pool and min(height, width) >> self.blocks_n == 0:
            raise UserError(
                f"--network conv4-pool: its four poolings leave nothing of {height}x{width}; it "
                "needs images of 16x16 or more (--image-size), --network conv4 does not"
            )
        self.image_shape = image_shape
        self.pool, self.mean = pool, not pool if mean is None else mean
        self.filters, self.ways = filters, ways
        self.leak, self.eps = leak, norm_eps
        self.blocks = nn.ModuleList(
            ConvBlock(
                channels if i == 0 else filters, filters, pool=pool, leak=leak, norm_eps=norm_eps
            )
            for i in range(self.blocks_n)
        )
        self.n_features = filters
        if not self.mean:
            for _ in range(self.blocks_n):
                height, width = (side // 2 if pool else (side + 1) // 2 for side in (height, width))
            self.n_features *= height * width
        self.head = nn.Linear(self.n_features, ways)
        HEAD_INITS[head_init](self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        used = []
        for i, block in enumerate(self.blocks):
            x, of_block = block(x, None if statistics is None else statistics[i])
            used.append(of_block)
        return self.head(x.mean(dim=(2, 3)) if self.mean else x.flatten(1)), tuple(used)


def is_headless(network: Conv4) -> bool:
    """Say whether `maml.networks.headless.without_head` has taken a network's output layer off."""
    return isinstance(network.get_submodule("head"), nn.Identity)
