"""Meta-SGD (Li et al. 2017, arXiv:1707.09835)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from maml.config import Config
from maml.learners.maml import MAML
from maml.metagradient.inner import Params

COMPONENTS = {
    "metasgd": {
        "attribute": "MetaSGD",
        "help": "learns an inner rate for each weight, too",
        "reads": (
            "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "order", "shots",
            "queries", "eval_queries",
        ),
        "refuses": {"inner_steps": {0: "would have no use for its rates"}},
    }
}  # fmt: skip

_PREFIX = "rates."


class MetaSGD(MAML):
    """MAML that learns, beside the initial weights θ, an inner rate α for each of them.

    θ' = θ − α ∘ ∇L(θ) (equation 3), as often as ``--inner-steps`` says (the paper: once); any
    ``--inner-optimizer``'s updates in place of the gradient. All rates begin at ``--inner-lr``.
    """

    learned_rates = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.inner_lr = 1.0
        # A tree of the same names, ``rates.…`` for ``network.…``; it is never called.
        self.rates: nn.Module = copy.deepcopy(self.network)
        for rate in self.rates.parameters():
            nn.init.constant_(rate, config.inner_lr)

    def inner_rates(self, meta_params: Params, steps: int) -> list[Params]:
        """The same meta-parameters at each step."""
        rates = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in meta_params.items()
            if name.startswith(_PREFIX)
        }
        return [rates] * steps

    def rates_gradients(self, rates: list[Params]) -> Params:
        """Add the steps up; without one, no loss depends on the rates."""
        return {
            f"{_PREFIX}{name}": torch.stack([of_step[name] for of_step in rates]).sum(0)
            for name in rates[0]
        }
