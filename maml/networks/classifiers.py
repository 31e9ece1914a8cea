"""Ordinary classifiers: LeNet, ResNet-12, and torchvision's ResNets and VGGs.

They are ordinary modules; `maml.networks.ordinary` makes their batch statistics explicit. There is
no dropout.

Shape legend: E examples, C channels, H W pixels, N ways.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from maml.errors import UserError

COMPONENTS = {
    "lenet": {"attribute": "LeNet", "help": "LeNet-5, as it is built today"},
    "resnet12": {"attribute": "ResNet12", "help": "deep, of few-shot tables, 64 to 640 filters"},
    "resnet18": {"attribute": "resnet", "help": "torchvision's", "options": {"layers": 18}},
    "resnet34": {"like": "resnet18", "options": {"layers": 34}},
    "resnet50": {"like": "resnet18", "options": {"layers": 50}},
    "resnet101": {"like": "resnet18", "options": {"layers": 101}},
    "resnet152": {"like": "resnet18", "options": {"layers": 152}},
    "vgg11": {
        "attribute": "vgg",
        "help": "torchvision's, without dropout",
        "options": {"table": "A"},
    },
    "vgg13": {"like": "vgg11", "options": {"table": "B"}},
    "vgg16": {"like": "vgg11", "options": {"table": "D"}},
    "vgg19": {"like": "vgg11", "options": {"table": "E"}},
}

SMALL = 64
"""Images up to this many pixels a side count as small: they cannot afford to lose resolution."""
LEAST = 32
"""Pixels a side of LeNet's input; a VGG's five poolings leave one pixel of such an image."""
WIDTHS = (64, 160, 320, 640)
"""Filters of each block of ResNet-12, as MetaOptNet has them."""
LEAK = 0.1
"""Slope of ResNet-12's activations below zero."""


def _frame(sides: Sequence[int]) -> nn.Module:
    """Return a layer that frames images below 32×32 with zeros, as behind drawn characters."""
    height, width = (max(0, LEAST - side) for side in sides)
    return nn.ZeroPad2d((width // 2, width - width // 2, height // 2, height - height // 2))


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998, doi:10.1109/5.726791) as people build it today.

    It has the paper's layers and sizes (6 and 16 maps, 120, 84) and 32×32 input. ReLU, max-pooling
    and a linear output replace scaled tanh, trained averages and radial basis functions. Like all
    networks here, it maps images ``[E, C, H, W]`` to logits ``[E, N]``.
    """

    head_prefix = "12."

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        channels, *sides = image_shape
        height, width = (((max(side, LEAST) - 4) // 2 - 4) // 2 for side in sides)
        super().__init__(
            _frame(sides),
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * height * width, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, ways),
        )


class Block(nn.Module):
    """A residual block: three 3×3 convolutions plus a 1×1 shortcut, pooled 2×2.

    Each convolution has a batch norm. The block halves H and W, rounded down.
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
        """Raise `UserError` for images smaller than 16×16."""
        channels, height, width = image_shape
        if min(height, width) >> len(WIDTHS) == 0:
            raise UserError(
                f"--network resnet12: its four poolings leave nothing of {height}x{width}; it "
                "needs images of 16x16 or more (--image-size)"
            )
        super().__init__()
        for i, (before, after) in enumerate(itertools.pairwise((channels, *WIDTHS))):
            # A sequence of one block, because learn2learn's tensor names have its index.
            self.add_module(f"layer{i + 1}", nn.Sequential(Block(before, after)))
        self.head = nn.Linear(WIDTHS[-1], ways)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        for i in range(len(WIDTHS)):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.head(x.mean(dim=(2, 3)))


def resnet(image_shape: tuple[int, int, int], ways: int, *, layers: int) -> nn.Module:
    """Return torchvision's residual network (He et al. 2016, arXiv:1512.03385).

    For images up to 64 pixels the first convolution is 3×3 of stride 1, and no pooling follows, as
    in the paper's CIFAR networks (section 4.2). The usual stem would reduce 32×32 pixels to 8×8.
    """
    # Imported late: it is heavy, and most networks here do without.
    from torchvision import models

    network = getattr(models, f"resnet{layers}")(num_classes=ways)
    channels, *sides = image_shape
    if max(sides) <= SMALL:
        network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    else:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.head_prefix = "fc."
    return network


def vgg(image_shape: tuple[int, int, int], ways: int, *, table: str) -> nn.Module:
    """Return a VGG network (Simonyan and Zisserman 2015, arXiv:1409.1556), without dropout.

    Before the classifier the map is pooled to 7×7 cells as in torchvision, but never to more cells
    than it has. A 32×32 image leaves one cell; 49 copies of the cell would only enlarge the first
    matrix. Smaller images get a frame of zeros, because five poolings would leave nothing of them.
    ``table``: the letter of a table of layers in torchvision, and of a column in the paper.
    """
    # Imported late: it is heavy, and most networks here do without.
    from torchvision.models import vgg

    channels, *sides = image_shape
    rows, columns = (min(7, max(side, LEAST) // 32) for side in sides)
    features = vgg.make_layers(vgg.cfgs[table])
    features[0] = nn.Conv2d(channels, 64, 3, padding=1)
    classifier = nn.Sequential(
        *(nn.Linear(512 * rows * columns, 4096), nn.ReLU()),
        *(nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, ways),
    )
    network = nn.Sequential(
        OrderedDict(
            frame=_frame(sides),
            features=features,
            avgpool=nn.AdaptiveAvgPool2d((rows, columns)),
            flat=nn.Flatten(),
            classifier=classifier,
        )
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    network.head_prefix = "classifier.4."  # type: ignore[assignment]
    return network
