"""Whether compiled kernels serve a network, as they do its `ConvBlocks`."""

from collections.abc import Iterator

from torch import nn

from maml.networks.conv4 import ConvBlocks
from maml.networks.ordinary import Ordinary


def allow_kernels(network: nn.Module, allowed: bool) -> None:
    """Let compiled kernels serve all of a network that they can, or nothing."""
    for part in _parts(network):
        part.kernels = allowed


def obstacle(network: nn.Module) -> str | None:
    """Say why compiled kernels do not serve ``network`` on the CPU, or return None."""
    parts = list(_parts(network))
    if not parts:
        stated = network.module if isinstance(network, Ordinary) else network
        return f"there are no compiled kernels for the network {type(stated).__name__}"
    return next((why for part in parts if (why := part.why_torch())), None)


def _parts(network: nn.Module) -> Iterator[ConvBlocks]:
    return (part for part in network.modules() if isinstance(part, ConvBlocks))
