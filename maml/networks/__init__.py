"""Networks as modules with explicit batch statistics; ``COMPONENTS`` lists a file's networks."""

from maml.networks.build import build_network

__all__ = ["build_network"]
