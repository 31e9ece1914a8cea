"""Meta-SGD (Li et al. 2017, arXiv:1707.09835)."""

import dataclasses

import torch

from maml.config import Config
from maml.learners.maml import MAML
from maml.learners.objectives import Given
from maml.learners.trees import tree
from maml.metagradient.problem import Problem
from maml.params import Params, without_prefix

COMPONENTS = {
    "metasgd": {
        "like": "maml",
        "attribute": "MetaSGD",
        "help": "learns an inner rate for each weight, too",
        "refuses": {"inner_steps": {0: "would have no use for its rates"}},
    }
}


class MetaSGD(MAML):
    """MAML that learns, beside the initial weights θ, an inner rate α for each of them.

    θ' = θ − α ∘ ∇L(θ) (equation 3), as often as ``--inner-steps`` says (the paper: once); any
    ``--inner-optimizer``'s updates in place of the gradient. Rates begin at ``--inner-lr``,
    times what ``--adapt`` says.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        weights = self.network_weights(self.meta_parameters())
        # The names of what adapts: ``rates.…`` for ``network.…``.
        self.rates = tree(
            {
                name: torch.full_like(weights[name], config.inner_lr * rate)
                for name, rate in self.adapting.items()
            }
        )

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """MAML's, with the same learned rates at each step."""
        rates = without_prefix(meta_params, "rates.")
        problem = super().problem(meta_params, steps)
        return dataclasses.replace(problem, lr=1.0, rates=[rates] * steps)
