"""ResNet-12, the deep network of few-shot tables: an ordinary module.

Shape legend: E examples, C channels, H W pixels, N ways.
"""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from maml.errors import UserError

COMPONENTS = {
    "resnet12": {
        "attribute": "ResNet12",
        "help": "few-shot tables' deep one, 64 to 640 filters",
    },
}

WIDTHS = (64, 160, 320, 640)
"""Filters of each block, as MetaOptNet has them."""
LEAK = 0.1


class Block(nn.Module):
    """Three 3×3 convolutions beside one of 1×1, each with a batch norm; their sum, pooled 2×2.

    It halves H and W, rounded down.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels_in, channels_out, 3)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _convolution(channels_out, channels_out, 3)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.conv3 = _convolution(channels_out, channels_out, 3)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.downsample = nn.Sequential(
            _convolution(channels_in, channels_out, 1), nn.BatchNorm2d(channels_out)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[E, channels_out, H/2, W/2]``."""
        out = F.leaky_relu(self.bn1(self.conv1(x)), LEAK)
        out = F.leaky_relu(self.bn2(self.conv2(out)), LEAK)
        out = self.bn3(self.conv3(out)) + self.downsample(x)
        return F.max_pool2d(F.leaky_relu(out, LEAK), 2)


def _convolution(channels_in: int, channels_out: int, side: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels_in, channels_out, side, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="leaky_relu")
    return layer


class ResNet12(nn.Module):
    """Four residual blocks, a spatial mean and a linear head.

    The network is TADAM's (Oreshkin et al. 2018, arXiv:1805.10123, section 3), as wide as
    MetaOptNet's (Lee et al. 2019, arXiv:1904.03758, section 4.1): 12.4 million parameters. Tensors
    have the names of learn2learn's ``ResNet12Backbone``. There is no DropBlock.
    """

    head_prefix = "head."

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        """Raises `UserError` for images smaller than 16×16."""
        channels, height, width = image_shape
        if min(height, width) >> len(WIDTHS) == 0:
            raise UserError(
                f"--network resnet12: its four poolings leave nothing of {height}x{width}; it "
                "needs images of 16x16 or more (--image-size)"
            )
        super().__init__()
        for i, (before, after) in enumerate(itertools.pairwise((channels, *WIDTHS))):
            # A list of one: that is how others name its tensors.
            self.add_module(f"layer{i + 1}", nn.Sequential(Block(before, after)))
        self.head = nn.Linear(WIDTHS[-1], ways)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        for i in range(len(WIDTHS)):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.head(x.mean(dim=(2, 3)))
