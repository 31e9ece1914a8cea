"""Networks, as modules whose batch statistics are explicit."""

from __future__ import annotations

from maml.networks.build import build_network

__all__ = ["build_network"]
