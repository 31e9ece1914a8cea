"""The outer loop's optimizer: the one place where meta-parameters change."""

from __future__ import annotations

from typing import Any

import torch

from maml.config import Config
from maml.inner import Params


class OuterOptimizer:
    """Steps meta-parameters along the mean over tasks of their gradient.

    Adam as in the released code of MAML (arXiv:1703.03400), or SGD with momentum.
    """

    def __init__(self, config: Config, meta_params: Params) -> None:
        self._clip = config.grad_clip
        self._params = meta_params
        self._optimizer: torch.optim.Optimizer
        if config.meta_optimizer == "adam":
            # Fused: one operation for all, while every other process waits.
            self._optimizer = torch.optim.Adam(meta_params.values(), lr=config.meta_lr, fused=True)
        else:
            self._optimizer = torch.optim.SGD(
                meta_params.values(),
                lr=config.meta_lr,
                momentum=config.meta_momentum,
                fused=True,
            )

    def step(self, gradients: Params, n_tasks: int) -> None:
        """Step along Σ gradient / n (arXiv:1703.03400, algorithm 2, line 10), clipped by value.

        Args:
            gradients: Σ over tasks of the gradient, of each meta-parameter by name.
            n_tasks: How many tasks were summed; at least 1.
        """
        for name, parameter in self._params.items():
            gradient = gradients[name] / n_tasks
            if self._clip is not None:
                gradient.clamp_(-self._clip, self._clip)
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return its state, for a checkpoint."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; how its arithmetic is done is this optimizer's own business."""
        groups = [{**group, "fused": True} for group in state["param_groups"]]
        self._optimizer.load_state_dict({**state, "param_groups": groups})
