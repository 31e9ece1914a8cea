"""2-D navigation, Finn et al. 2017 (arXiv:1703.03400), section 5.3."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets.environments.acting import Environment

COMPONENTS = {
    "navigation": {
        "help": "walk to a goal on a plane, which only rewards tell of",
        "attribute": "Navigation",
        "tasks": ("environments",),
        "classifies": False,
        "point": (2, 2),
        "reads": ("horizon",),
        "ignores": {"ways": "has no classes"},
    }
}

HALF = 0.5  # goals are uniform in the square [-HALF, HALF]^2
FASTEST = 0.1  # a step's greatest length along each axis
CLOSE = 0.01  # an episode ends when the goal is nearer than this


class Navigation(Environment):
    """State: position and goal. The position is observed; reward: minus the squared distance.

    A policy outputs a mean velocity. The environment clips actions to ±0.1.
    """

    state_size, observation_size, outputs, draws, discrete = 4, 2, 2, 2, False

    def observe(self, state: Tensor) -> Tensor:
        """Return the position."""
        return state[..., :2]

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move by ``action [..., 2]``."""
        at, goal = state[..., :2], state[..., 2:]
        at = at + action.to(at.dtype).clamp(-FASTEST, FASTEST)
        distance = (at - goal).square().sum(-1)
        return torch.cat([at, goal], dim=-1), -distance, distance < CLOSE**2

    def draw_task(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Draw a goal."""
        return HALF * (2 * u[:, :2] - 1)

    def draw_start(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Start at the origin."""
        return np.zeros((*u.shape[:-1], 2))
