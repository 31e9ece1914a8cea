"""MAML with implicit gradients (Rajeswaran et al. 2019, arXiv:1909.04630)."""

from __future__ import annotations

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.learners.base import OuterGradient
from maml.learners.maml import MAML
from maml.metagradient import implicit
from maml.metagradient.derivatives import FunctionLoss
from maml.metagradient.inner import Params
from maml.metagradient.rules import make_rule

COMPONENTS = {
    "imaml": {
        "attribute": "IMAML",
        "help": "the implicit gradient of a regularised inner loop",
        "reads": (
            "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "proximal",
            "cg_steps", "cg_damping", "shots", "queries", "eval_queries",
        ),
        "refuses": {"meta_gradient": {"reverse": "is implicit: no way is gone back"}},
    }
}  # fmt: skip


class IMAML(MAML):
    """Initial weights that pull the adapted ones, whose meta-gradient is that of the solution.

    The inner loop minimises the support loss plus λ/2 ‖φ − θ‖² (equation 3), in training and at
    test, λ being ``--proximal``.
    """

    def support_loss(self, weights: Params, start: Params, task: Task) -> Tensor:
        """See `MAML.support_loss`: with the pull of the initial weights."""
        away = torch.stack([(weights[n] - start[n]).square().sum() for n in weights]).sum()
        return super().support_loss(weights, start, task) + 0.5 * self.config.proximal * away

    def outer_gradient(self, meta_params: Params, tasks: Task) -> OuterGradient:
        """Differentiate implicitly, whatever the way of the inner loop was."""
        config = self.config
        outer = implicit.meta_gradient(
            self._native_loss(tasks.support_x.device) or FunctionLoss(self.set_loss),
            self.network_weights(meta_params),
            tasks,
            rule=make_rule(config.inner_optimizer, self.inner_lr),
            steps=config.inner_steps,
            proximal=config.proximal,
            cg_steps=config.cg_steps,
            cg_damping=config.cg_damping,
        )
        return self.named(outer, tasks)
