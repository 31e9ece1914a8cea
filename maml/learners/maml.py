"""Model-Agnostic Meta-Learning (Finn et al. 2017, arXiv:1703.03400), second and first order."""

from __future__ import annotations

from maml.learners.base import Learner
from maml.metagradient.problem import Problem
from maml.params import Params


class MAML(Learner):
    """Initial weights from which a few inner steps on the support set suit the query set."""

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """The query loss after the last inner step (algorithm 2, line 10)."""
        weights = self.network_weights(meta_params)
        return Problem(
            start={name: tensor for name, tensor in weights.items() if self.adapts(name)},
            fixed={name: tensor for name, tensor in weights.items() if not self.adapts(name)},
            **self.stated_losses(),
            optimizer=self.config.inner_optimizer,
            lr=self.config.inner_lr,
            steps=steps,
            order=self.config.order,
        )

    def adapts(self, name: str) -> bool:
        """Say whether the inner loop adapts the network's parameter ``name``."""
        return True
