"""Meta-SGD (Li et al. 2017, arXiv:1707.09835)."""

from __future__ import annotations

import copy
import dataclasses

from torch import nn

from maml.config import Config
from maml.learners.base import without_prefix
from maml.learners.maml import MAML
from maml.metagradient.problem import Problem
from maml.params import Params


class MetaSGD(MAML):
    """MAML that learns, beside the initial weights θ, an inner rate α for each of them.

    θ' = θ − α ∘ ∇L(θ) (equation 3), as often as ``--inner-steps`` says (the paper: once); any
    ``--inner-optimizer``'s updates in place of the gradient. All rates begin at ``--inner-lr``.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # A tree of the same names, ``rates.…`` for ``network.…``; it is never called.
        self.rates: nn.Module = copy.deepcopy(self.network)
        for rate in self.rates.parameters():
            nn.init.constant_(rate, config.inner_lr)

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """MAML's, with the same learned rates at each step."""
        rates = without_prefix(meta_params, "rates.")
        problem = super().problem(meta_params, steps)
        return dataclasses.replace(problem, lr=1.0, rates=[rates] * steps)
