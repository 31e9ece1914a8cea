"""Networks, as modules whose batch statistics are explicit. One file or more, with their facts."""

from __future__ import annotations

from maml.networks.build import build_network, network_options

__all__ = ["build_network", "network_options"]
