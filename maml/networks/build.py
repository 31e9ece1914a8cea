"""Which network a name means."""

from __future__ import annotations

from torch import nn

from maml.errors import UserError
from maml.networks.classifiers import build_classifier
from maml.networks.conv4 import Conv4
from maml.networks.mlp import MLP


def build_network(
    name: str, *, image_shape: tuple[int, int, int] | None, ways: int, filters: int
) -> nn.Module:
    """Return the network that ``--network name`` means, with weights from the global generator.

    Args:
        name: One of the choices of ``Config.network``.
        image_shape: (C, H, W) of the data; None where it is not images.
        ways: Outputs of a classifier.
        filters: Channels of every convolution of conv4 and conv4-pool.

    Raises:
        UserError: naming the flag, for images that are too small for the network.
    """
    if name == "mlp":
        return MLP()
    if image_shape is None:
        raise ValueError(f"network {name!r} takes images")
    _, height, width = image_shape
    if name == "conv4-pool" and min(height, width) < 16:
        raise UserError(
            f"--network conv4-pool: its four poolings leave nothing of {height}x{width}; it needs "
            "images of 16x16 or more (--image-size), --network conv4 does not"
        )
    if name in ("conv4", "conv4-pool"):
        return Conv4(image_shape, ways, filters=filters, pool=name == "conv4-pool")
    return build_classifier(name, image_shape, ways)
