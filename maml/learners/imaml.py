"""MAML with implicit gradients (Rajeswaran et al. 2019, arXiv:1909.04630)."""

import dataclasses

from maml.learners.maml import MAML
from maml.metagradient.problem import Implicit, Problem
from maml.params import Params

COMPONENTS = {
    "imaml": {
        "like": "maml",
        "attribute": "IMAML",
        "help": "the implicit gradient of a regularised inner loop",
        "reads": (
            "proximal", "cg_steps", "cg_damping", "cg_lambda", "pull", "eval_proximal"
        ),
        "ignores": {"order": "has an implicit gradient"},
        "refuses": {"meta_gradient": {"reverse": "has an implicit gradient, no pass back"}},
    }
}  # fmt: skip


class IMAML(MAML):
    """Initial weights θ pull the adapted ones φ. The meta-gradient is that at the inner solution.

    The inner loop minimises the support loss plus λ/2 ‖φ − θ‖² (equation 3). λ is ``--proximal`` in
    training. At test λ is the same, unless ``--eval-proximal`` sets another value.

    The released code differs; docs/learners.md has the flags with which presets follow it.
    """

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the problem of evaluation: MAML's with the pull."""
        problem = dataclasses.replace(super().problem(meta_params, steps), order="second")
        if self.config.eval_proximal is None:
            return self._pulled(problem)
        return dataclasses.replace(problem, proximal=self.config.eval_proximal)

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """Return the same with the pull of training, differentiated at the solution."""
        return self._pulled(self.problem(meta_params, self.config.inner_steps))

    def _pulled(self, problem: Problem) -> Problem:
        config = self.config
        implicit = Implicit(config.cg_steps, config.cg_damping, config.cg_lambda)
        return dataclasses.replace(
            problem, proximal=config.proximal, pull=config.pull, implicit=implicit
        )
