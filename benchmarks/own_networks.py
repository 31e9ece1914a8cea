"""Networks as a researcher writes them: plain torch modules, each one ``x → outputs``.

Each takes the images' shape and the number of classes, as ``--network`` requires of a user's own
network: ``--network benchmarks.own_networks:ResidualCNN``.
"""

import functools
import math

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

Shape = tuple[int, int, int]


def _norm(channels: int) -> nn.Module:
    """Return a batch norm that keeps no running statistics."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


class ResidualCNN(nn.Sequential):
    """Three stages of a 3×3 convolution and a residual block, with batch norm (He et al. 2016)."""

    def __init__(self, image_shape: Shape, ways: int, width: int = 32) -> None:
        stages: list[nn.Module] = []
        channels = image_shape[0]
        for _ in range(3):
            convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            residual = BasicBlock(width, width, norm_layer=_norm)
            stages += [convolution, _norm(width), nn.ReLU(), residual, nn.MaxPool2d(2)]
            channels = width
        mean = nn.AdaptiveAvgPool2d(1)
        super().__init__(*stages, mean, nn.Flatten(), nn.Linear(width, ways))


class GroupNormCNN(nn.Sequential):
    """Four 3×3 convolutions with group norm (Wu and He 2018)."""

    def __init__(self, image_shape: Shape, ways: int, width: int = 32) -> None:
        blocks: list[nn.Module] = []
        channels = image_shape[0]
        for _ in range(4):
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            blocks += [convolution, nn.GroupNorm(8, width), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        size = (image_shape[1] // 16) * (image_shape[2] // 16)
        super().__init__(*blocks, nn.Flatten(), nn.Linear(width * size, ways))


def resnet18(image_shape: Shape, ways: int) -> nn.Module:
    """Return torchvision's ResNet-18, whose batch norm keeps no running statistics."""
    return torchvision.models.resnet18(num_classes=ways, norm_layer=_norm)


class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al. 2021) of torch's encoder layers."""

    def __init__(
        self, image_shape: Shape, ways: int, width: int = 64, patch: int = 7, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(image_shape[0], width, patch, stride=patch)
        n_patches = (image_shape[1] // patch) * (image_shape[2] // patch)
        self.places = nn.Parameter(0.02 * torch.randn(n_patches, width))
        layer = functools.partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True)
        self.layers = nn.Sequential(*(layer(width, 4, 2 * width, dropout) for _ in range(3)))
        self.head = nn.Linear(width, ways)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(tokens).mean(1))


class RowsLSTM(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self, image_shape: Shape, ways: int, width: int = 64) -> None:
        super().__init__()
        self.cells = nn.LSTM(image_shape[0] * image_shape[2], width, batch_first=True)
        self.head = nn.Linear(width, ways)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        rows = x.transpose(1, 2).flatten(2)
        return self.head(self.cells(rows)[0][:, -1])


class Perceptron(nn.Sequential):
    """One hidden layer: almost all of a step is Python's work, not mathematics."""

    def __init__(self, image_shape: Shape, ways: int, width: int = 64) -> None:
        first = nn.Linear(math.prod(image_shape), width)
        super().__init__(nn.Flatten(), first, nn.ReLU(), nn.Linear(width, ways))


class Switch(nn.Module):
    """A small perceptron that reads a value, so that tasks cannot be batched."""

    def __init__(self, image_shape: Shape, ways: int, width: int = 64) -> None:
        super().__init__()
        first = nn.Linear(math.prod(image_shape), width)
        self.layers = nn.ModuleList([first, nn.Linear(width, width)])
        self.head = nn.Linear(width, ways)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[E, C, H, W]`` to logits ``[E, N]``."""
        hidden = torch.tanh(self.layers[0](x.flatten(1)))
        if hidden.abs().mean() > 0:
            hidden = torch.relu(self.layers[1](hidden))
        return self.head(hidden)
