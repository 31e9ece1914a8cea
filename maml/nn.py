"""Layers for networks of one's own, which compiled kernels compute."""

from maml.networks.conv4 import ConvBlocks as ConvBlocks

__all__ = ["ConvBlocks"]
