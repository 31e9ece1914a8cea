"""Compiled kernels: a faster `SetLoss` for the networks that they know."""

from __future__ import annotations

from torch import nn

from maml.config import Config
from maml.errors import UserError
from maml.kernels import library
from maml.metagradient.derivatives import SetLoss
from maml.networks.conv4 import Conv4


def native_set_loss(config: Config, network: nn.Module, device: str) -> SetLoss | None:
    """Return the compiled loss of ``network``, or None where there is none.

    Raises:
        UserError: with ``--kernels native``, in place of None.
    """
    reason = _obstacle(config, network, device)
    if reason is None:
        from maml.kernels.convnet import ConvNetLoss

        assert isinstance(network, Conv4)
        return ConvNetLoss(network)
    if config.kernels == "native":
        raise UserError(f"--kernels native: {reason}")
    return None


def _obstacle(config: Config, network: nn.Module, device: str) -> str | None:
    """Return why the kernels cannot serve, or None."""
    if config.kernels == "torch":
        return "--kernels torch was asked for"
    if not isinstance(network, Conv4):
        return f"there are none for --network {config.network}"
    if device != "cpu":
        return f"they run on the CPU, not on --device {device}"
    if config.precision == "bf16":
        return "they compute in float32, not in --precision bf16"
    lanes = library.lanes(8 if config.dtype == "float64" else 4)
    if lanes is None:
        return f"they could not be compiled: {library.failure()}"
    if config.filters % lanes:
        return f"--filters {config.filters} is no multiple of {lanes}, this machine's vector"
    return None
