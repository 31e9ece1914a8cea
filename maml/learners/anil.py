"""Almost No Inner Loop (Raghu et al. 2020, arXiv:1909.09157, section 4)."""

from __future__ import annotations

import torch

from maml.learners.maml import MAML
from maml.metagradient.inner import Params

COMPONENTS = {
    "anil": {
        "attribute": "ANIL",
        "help": "adapts the output layer alone",
        "reads": (
            "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "order", "shots",
            "queries", "eval_queries",
        ),
        "adapts_head": True,
    }
}  # fmt: skip


class ANIL(MAML):
    """MAML whose inner loop, in training and at test, adapts the network's output layer alone."""

    def inner_rates(self, meta_params: Params, steps: int) -> list[Params]:
        """One for the output layer, and none for the body."""
        head = self.network.head_prefix
        assert isinstance(head, str)
        weights = self.network_weights(meta_params)
        rates = {n: torch.ones_like(w) for n, w in weights.items() if n.startswith(head)}
        return [rates] * steps
