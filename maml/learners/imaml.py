"""MAML with implicit gradients (Rajeswaran et al. 2019, arXiv:1909.04630)."""

from __future__ import annotations

import dataclasses

from maml.learners.maml import MAML
from maml.metagradient.problem import Implicit, Problem
from maml.params import Params


class IMAML(MAML):
    """Initial weights that pull the adapted ones, whose meta-gradient is that of the solution.

    The inner loop minimises the support loss plus λ/2 ‖φ − θ‖² (equation 3), in training and at
    test, λ being ``--proximal``.
    """

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """MAML's with the pull, differentiated at its solution."""
        config = self.config
        return dataclasses.replace(
            super().problem(meta_params, steps),
            order="second",
            proximal=config.proximal,
            implicit=Implicit(config.cg_steps, config.cg_damping),
        )
