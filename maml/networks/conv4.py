"""MAML's networks, as modules with explicit batch statistics.

A network maps ``(x, statistics)`` to ``(outputs, statistics)``. If ``statistics`` is None, every
normalisation uses and returns the statistics of the current batch. Given statistics are used
unchanged. No running buffer exists, so tasks share nothing, and an evaluator may normalise a query
set with the statistics of the support set. A network's ``head_prefix`` begins the names of its
output layer's parameters.

Shape legend: E examples, C channels, H W pixels, N ways.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from maml.errors import UserError
from maml.kernels import library
from maml.kernels.convnet import DTYPES, Shape, lay_out
from maml.networks import stack
from maml.networks.ordinary import Ordinary, is_hooked
from maml.networks.statistics import EPS, BatchNorm, Statistics, Taped

COMPONENTS = {
    "conv4": {
        "attribute": "Conv4",
        "help": "four strided blocks, spatial mean",
        "options": {"pool": False, "mean": True},
        "reads": ("filters", "leak", "norm_eps", "head_init"),
    },
    "conv4-flat": {
        "like": "conv4",
        "help": "four strided blocks, flattened",
        "options": {"pool": False, "mean": False},
    },
    "conv4-pool": {
        "like": "conv4",
        "help": "four blocks with max-pools, flattened",
        "options": {"pool": True, "mean": False},
    },
}


HEAD_INITS: dict[str, Callable[[Tensor], object]] = {
    "small": lambda weight: nn.init.trunc_normal_(weight, std=0.01, a=-0.02, b=0.02),
    "normal": nn.init.normal_,
    "xavier": nn.init.xavier_uniform_,
}
"""Initialisers of the output layer's weights, by the value of ``--head-init``."""


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
        # The same numbers in the kernels' layout, so kernels read and write without a copy.
        self.conv.weight = nn.Parameter(lay_out(self.conv.weight.detach()))
        self.norm = BatchNorm(channels_out, norm_eps)

    def forward(
        self, x: Tensor, given: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return ``[E, channels_out, H/2, W/2]`` and the statistics used."""
        x, used = self.norm(self.conv(x), given)
        x = F.leaky_relu(x, self.leak) if self.leak else F.relu(x)
        return F.max_pool2d(x, 2) if self.pool else x, used


class ConvBlocks(Taped):
    """A stack of `ConvBlock`: images ``[E, C, H, W]`` to features ``[E, n_features]``.

    Compiled kernels compute it on the CPU, also inside a user's own network, under any loss::

        blocks = maml.nn.ConvBlocks((3, 84, 84), filters=32, pool=True)
        net = nn.Sequential(blocks, nn.Linear(blocks.n_features, 5))

    Attributes:
        n_features: How many features an image has.
        least: A block normalises at least so many pixels of an image.
    """

    kernels = True
    """Whether compiled kernels may compute the blocks."""

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        filters: int = 64,
        layers: int = 4,
        pool: bool = False,
        mean: bool = False,
        leak: float = 0.0,
        norm_eps: float = EPS,
    ) -> None:
        """Make the stack.

        Args:
            image_shape: (C, H, W) of the images.
            filters: Channels of each convolution.
            layers: How many blocks; each halves H and W.
            pool: Whether max-pools halve them; else strides do.
            mean: Whether features are means over the last H and W; else the map is flattened.
            leak: Slope of the activations below zero.
            norm_eps: Added to the variance.
        """
        super().__init__()
        if min(filters, layers) < 1 or not 0 <= leak < 1 or norm_eps <= 0:
            stated = f"filters {filters}, layers {layers}, leak {leak}, norm_eps {norm_eps}"
            raise ValueError(f"{stated}: at least 1, at least 1, from 0 to below 1, above 0")
        channels, height, width = image_shape
        self.image_shape = channels, height, width
        self.pool, self.mean, self.filters = pool, mean, filters
        self.leak, self.eps = leak, norm_eps
        self.blocks = nn.ModuleList(
            ConvBlock(
                channels if i == 0 else filters, filters, pool=pool, leak=leak, norm_eps=norm_eps
            )
            for i in range(layers)
        )
        for _ in range(layers):
            height, width = (side // 2 if pool else (side + 1) // 2 for side in (height, width))
        if not height * width:
            raise ValueError(f"{layers} poolings leave nothing of images {list(image_shape)}")
        self.n_features = filters if mean else filters * height * width
        self.least = height * width * (4 if pool else 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, normalised by statistics on the tape, or else by the batch's."""
        given = None if self.tape is None else self.tape.next(len(self.blocks))
        features, used = self.features(x, given)
        if self.tape is not None:
            self.tape.used.extend(used)
        return features

    def features(
        self, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Return the features, and the statistics used: those that are given, or the batch's."""
        if self._meets_kernels(x, statistics):
            layers: Any = (b._modules[name] for b in self.blocks for name in ("conv", "norm"))
            weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
            given = None
            if statistics is not None:
                given = torch.stack([torch.stack(pair) for pair in statistics])
            found, used = stack.features(stack.stack_of(self.shape()), x, given, weights)
            return found, tuple((mean, variance) for mean, variance in used)
        of_blocks = []
        for i, block in enumerate(self.blocks):
            x, of_block = block(x, None if statistics is None else statistics[i])
            of_blocks.append(of_block)
        return x.mean(dim=(2, 3)) if self.mean else x.flatten(1), tuple(of_blocks)

    def shape(self, ways: int = 0) -> Shape:
        """Return the settings that kernels need; ``ways`` above 0 adds a linear head."""
        return Shape(
            self.image_shape, self.filters, len(self.blocks), self.pool, self.mean, self.eps,
            self.leak, ways,
        )  # fmt: skip

    def _meets_kernels(self, x: Tensor, statistics: Statistics | None) -> bool:
        """Return whether kernels compute this call; if they cannot differentiate it, torch does."""
        if self.why_torch() is not None:
            return False
        weight: Tensor = self.blocks[0].conv.weight  # type: ignore[assignment, union-attr]
        return (
            type(x) in (Tensor, nn.Parameter)
            and (x.dtype, x.device, x.shape[1:]) == (weight.dtype, weight.device, self.image_shape)
            and len(x) * self.least > 1  # torch's way refuses one value a channel
            and not x.requires_grad
            and (
                statistics is None or not any(t.requires_grad for pair in statistics for t in pair)
            )
            and not torch.is_autocast_enabled("cpu")
            and forward_ad._current_level < 0
        )

    def why_torch(self) -> str | None:
        """Return why compiled kernels do not compute the blocks now, or None if they do."""
        if not self.kernels:
            return "--kernels torch was asked for"
        for i, block in enumerate(self.blocks):
            channels = self.filters if i else self.image_shape[0]
            size, stated = (self.filters, channels, 3, 3), (self.pool, self.leak, self.eps)
            if not _is_as_built(block, size, stated):
                return f"{_DO_NOT} block {i} is not as it was built"
        weight: Tensor = self.blocks[0].conv.weight  # type: ignore[assignment, union-attr]
        if weight.device.type != "cpu":
            return f"the compiled kernels run on the CPU, not on --device {weight.device.type}"
        if weight.dtype not in DTYPES:
            return f"the compiled kernels compute in float32 or float64, not in {weight.dtype}"
        lanes = library.lanes(weight.dtype.itemsize)
        if lanes is None:
            return f"the kernels could not be compiled: {library.failure()}"
        if wrong := stack.fault():
            return wrong
        if self.filters % lanes:
            return f"{_DO_NOT} --filters {self.filters} is no multiple of {lanes}, a vector here"
        return None


class Conv4(ConvBlocks):
    """MAML's convolutional networks (arXiv:1703.03400, section 5.2): four blocks and a linear head.

    Omniglot's has strided blocks of 64 filters and a spatial mean before the head. MiniImageNet's
    has pooled blocks of 32 filters and a flattened map before the head. Reptile's and iMAML's for
    Omniglot have strided blocks and a flattened map. ``mean`` None means ``not pool``.
    """

    head_prefix = "head."
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
        if pool and min(image_shape[1:]) >> 4 == 0:
            raise UserError(
                "--network conv4-pool: its four poolings leave nothing of "
                f"{image_shape[1]}x{image_shape[2]}; it needs images of 16x16 or more "
                "(--image-size), --network conv4 does not"
            )
        mean = not pool if mean is None else mean
        super().__init__(
            image_shape, filters=filters, pool=pool, mean=mean, leak=leak, norm_eps=norm_eps
        )
        self.ways = ways
        self.head = nn.Linear(self.n_features, ways)
        HEAD_INITS[head_init](self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, statistics: Statistics | None = None
    ) -> tuple[Tensor, Statistics]:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``; return the statistics used, too."""
        features, used = self.features(x, statistics)
        return self.head(features), used


_DO_NOT = "the compiled kernels do not serve this, as"


def _is_as_built(
    block: nn.Module, size: tuple[int, ...], stated: tuple[bool, float, float]
) -> bool:
    """Return whether a block is unchanged; ``size`` is the shape of its convolution's weight."""
    conv, norm = block._modules.get("conv"), block._modules.get("norm")
    if type(block) is not ConvBlock or type(conv) is not nn.Conv2d or type(norm) is not BatchNorm:
        return False
    stride = (1, 1) if stated[0] else (2, 2)
    return (
        (block.pool, block.leak, norm.eps) == stated
        and (conv.weight.shape, conv.stride, conv.padding) == (size, stride, (1, 1))
        and (conv.dilation, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros")
        and conv.bias is not None
        and len(block._modules) == 2
        and not any(is_hooked(module) for module in (block, conv, norm))
    )


def allow_kernels(network: nn.Module, allowed: bool) -> None:
    """Allow compiled kernels to compute the parts of a network that they can, or forbid it."""
    for part in _parts(network):
        part.kernels = allowed


def obstacle(network: nn.Module) -> str | None:
    """Return why compiled kernels do not compute ``network`` on the CPU, or None if they do."""
    parts = list(_parts(network))
    if not parts:
        stated = network.module if isinstance(network, Ordinary) else network
        return f"there are no compiled kernels for the network {type(stated).__name__}"
    return next((why for part in parts if (why := part.why_torch())), None)


def _parts(network: nn.Module) -> Iterator[ConvBlocks]:
    return (part for part in network.modules() if isinstance(part, ConvBlocks))
