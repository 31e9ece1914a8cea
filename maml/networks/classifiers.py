"""Ordinary classifiers by `conv4`'s protocol: LeNet, and torchvision's ResNets and VGGs.

torchvision builds the layers, so that names, shapes and initial distributions are its own; the
forward pass is written out here, where batch statistics are explicit. No dropout: everything random
has an address in this project, and a call of a network has none to draw a mask from.

Shape legend: E examples, C channels, H W pixels, N ways.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from maml.networks.statistics import BatchNorm, InTurn, Statistics

COMPONENTS = {
    "lenet": {
        "attribute": "LeNet", "help": "LeNet-5, as it is built today",
    },
    "resnet18": {
        "attribute": "ResNet", "help": "torchvision's, 18 layers",
        "options": {"block": "BasicBlock", "layers": [2, 2, 2, 2]},
    },
    "resnet34": {
        "attribute": "ResNet", "help": "torchvision's, 34 layers",
        "options": {"block": "BasicBlock", "layers": [3, 4, 6, 3]},
    },
    "resnet50": {
        "attribute": "ResNet", "help": "torchvision's, 50 layers",
        "options": {"block": "Bottleneck", "layers": [3, 4, 6, 3]},
    },
    "resnet101": {
        "attribute": "ResNet", "help": "torchvision's, 101 layers",
        "options": {"block": "Bottleneck", "layers": [3, 4, 23, 3]},
    },
    "resnet152": {
        "attribute": "ResNet", "help": "torchvision's, 152 layers",
        "options": {"block": "Bottleneck", "layers": [3, 8, 36, 3]},
    },
    "vgg11": {
        "attribute": "VGG", "help": "torchvision's, 11 layers, without dropout",
        "options": {"table": "A"},
    },
    "vgg13": {
        "attribute": "VGG", "help": "torchvision's, 13 layers, without dropout",
        "options": {"table": "B"},
    },
    "vgg16": {
        "attribute": "VGG", "help": "torchvision's, 16 layers, without dropout",
        "options": {"table": "D"},
    },
    "vgg19": {
        "attribute": "VGG", "help": "torchvision's, 19 layers, without dropout",
        "options": {"table": "E"},
    },
}  # fmt: skip

SMALL = 64
"""Images up to this many pixels a side count as small: they cannot afford to lose resolution."""
LEAST = 32
"""LeNet's input, and the least that a VGG's five poolings leave a pixel of."""


def _at_least_32(x: Tensor) -> Tensor:
    """Put zeros, which are background in drawn characters, around images smaller than 32×32."""
    height, width = (max(0, LEAST - size) for size in x.shape[-2:])
    if not (height or width):
        return x
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998, doi:10.1109/5.726791) as it is built today.

    Its layers and sizes (6 and 16 maps, 120, 84), on its 32×32 input, with ReLU, max-pooling and a
    linear output in place of scaled tanh, trained averages and radial basis functions.
    """

    head_prefix = "fc3."

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        left = [((max(size, LEAST) - 4) // 2 - 4) // 2 for size in (height, width)]
        self.fc1 = nn.Linear(16 * left[0] * left[1], 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, ways)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``; there are no statistics."""
        x = _at_least_32(x)
        for convolution in (self.conv1, self.conv2):
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x))), ()


class ResNet(nn.Module):
    """Residual networks (He et al. 2016, arXiv:1512.03385), torchvision's.

    For images up to 64 pixels the first convolution is 3×3 of stride 1, and no pooling follows, as
    in the paper's CIFAR networks (section 4.2): the usual stem would leave a 32×32 image 8×8.
    """

    head_prefix = "layers.fc."

    def __init__(
        self, image_shape: tuple[int, int, int], ways: int, *, block: str, layers: list[int]
    ) -> None:
        """``block`` and ``layers``: torchvision's name of a block, and how many in each stage."""
        # Imported late: it is heavy, and most networks here do without.
        from torchvision.models import resnet

        super().__init__()
        self.layers = resnet.ResNet(
            getattr(resnet, block),
            layers,
            num_classes=ways,
            norm_layer=functools.partial(BatchNorm, eps=1e-5),  # torchvision's
        )
        channels, *sides = image_shape
        self.small = max(sides) <= SMALL
        if self.small:
            first = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        else:
            first = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
        self.layers.conv1 = first

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        norms, layers = InTurn(statistics), self.layers
        x = F.relu(norms(layers.bn1, layers.conv1(x)))
        if not self.small:
            x = layers.maxpool(x)
        for stage in (layers.layer1, layers.layer2, layers.layer3, layers.layer4):
            for block in stage:
                x = _residual(block, x, norms)
        return layers.fc(x.mean(dim=(2, 3))), norms.used


def _residual(block: Any, x: Tensor, norms: InTurn) -> Tensor:
    """Apply a basic block (two convolutions) or a bottleneck (three) of torchvision's."""
    out = F.relu(norms(block.bn1, block.conv1(x)))
    out = norms(block.bn2, block.conv2(out))
    if hasattr(block, "conv3"):
        out = norms(block.bn3, block.conv3(F.relu(out)))
    if block.downsample is not None:
        convolution, norm = block.downsample
        x = norms(norm, convolution(x))
    return F.relu(out + x)


class VGG(nn.Module):
    """VGG networks (Simonyan and Zisserman 2015, arXiv:1409.1556), torchvision's, without dropout.

    Before the classifier the map is pooled to 7×7 cells as in torchvision, but never to more cells
    than it has (a 32×32 image leaves one): copies of a cell would only multiply the first matrix,
    by 49. Images smaller than 32×32 are framed with zeros: five poolings would leave none of them.
    """

    head_prefix = "classifier.2."

    def __init__(self, image_shape: tuple[int, int, int], ways: int, *, table: str) -> None:
        """``table``: torchvision's name of a table of layers, and the paper's of its column."""
        # Imported late: it is heavy, and most networks here do without.
        from torchvision.models import vgg

        super().__init__()
        channels, *sides = image_shape
        rows, columns = (min(7, max(side, LEAST) // 32) for side in sides)
        self.cells = (rows, columns)
        self.features = vgg.make_layers(vgg.cfgs[table])
        self.features[0] = nn.Conv2d(channels, 64, 3, padding=1)
        # Not torchvision's own: for 7×7 cells it would draw a hundred million weights.
        self.classifier = nn.ModuleList(
            (
                nn.Linear(512 * rows * columns, 4096),
                nn.Linear(4096, 4096),
                nn.Linear(4096, ways),
            )
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0, 0.01)
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``; there are no statistics."""
        x = self.features(_at_least_32(x))
        x = F.adaptive_avg_pool2d(x, self.cells).flatten(1)
        *hidden, output = self.classifier
        for layer in hidden:
            x = F.relu(layer(x))
        return output(x), ()
