"""Layers for a user's own networks, which the compiled kernels can compute."""

from maml.networks.conv4 import ConvBlocks as ConvBlocks

__all__ = ["ConvBlocks"]
