"""A learner of one's own: a subclass of one of ``maml.learners``."""

import torch

from maml.learners.maml import MAML


class Slower(MAML):
    """MAML whose inner steps grow shorter: each has half of the rate of the one before."""

    def inner_rates(self, meta_params, steps):
        weights = self.network_weights(meta_params)
        return [
            {name: torch.full_like(weight, 0.5**step) for name, weight in weights.items()}
            for step in range(steps)
        ]
