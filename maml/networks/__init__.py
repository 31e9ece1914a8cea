"""Networks, as modules whose batch statistics are explicit. One file or more, with their facts."""

from maml.networks.build import build_network

__all__ = ["build_network"]
