"""CartPole (Barto, Sutton and Anderson 1983, doi:10.1109/TSMC.1983.6313077) as tensors.

The dynamics are those of gymnasium's ``CartPole-v1``, step by step, for any number of carts at
once, each with its own physics.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets.environments.acting import Environment

COMPONENTS = {
    "cartpole": {
        "help": "balance a pole on a cart, as gymnasium's CartPole-v1",
        "attribute": "CartPole",
        "tasks": ("environments",),
        "classifies": False,
        "point": (4, 2),
        "reads": ("horizon",),
        "ignores": {"ways": "has two actions"},
    },
    "cartpole-physics": {
        "like": "cartpole",
        "help": "the same, each task with its own lengths, masses, gravity and force",
        "attribute": "DrawnCartPole",
    },
    "cartpole-turned": {
        "like": "cartpole",
        "help": "the same, and the force of half of the tasks is turned round",
        "attribute": "TurnedCartPole",
    },
}

TAU = 0.02  # seconds of a step
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360  # an episode ends beyond these (m, rad)
LEAST, MOST = 0.5, 1.5  # a task's constants are the standard ones times factors in this range


class Physics(NamedTuple):
    """The constants of gymnasium's CartPole, in SI units; ``length`` is half the pole's length."""

    gravity: float = 9.8
    mass_cart: float = 1.0
    mass_pole: float = 0.1
    length: float = 0.5
    force: float = 10.0


class CartPole(Environment):
    """State: x, ẋ, θ, θ̇ and the five `Physics`. The first four are observed; reward 1 a step."""

    state_size, observation_size, outputs, draws, discrete = 9, 4, 2, 1, True

    def observe(self, state: Tensor) -> Tensor:
        """Return what moves, rounded to float32 as in gymnasium."""
        return state[..., :4].float().to(state.dtype)

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push right (action 1) or left (0), and advance by one step of Euler's method."""
        x, v, angle, spin, gravity, cart, pole, length, push = state.unbind(-1)
        force = torch.where(action == 1, push, -push)
        cos, sin = torch.cos(angle), torch.sin(angle)
        total, moment = pole + cart, pole * length
        # https://coneural.org/florian/papers/05_cart_pole.pdf, in gymnasium's order of operations.
        temp = (force + moment * (spin * spin) * sin) / total
        spin_up = (gravity * sin - cos * temp) / (length * (4.0 / 3.0 - pole * (cos * cos) / total))
        speed_up = temp - moment * spin_up * cos / total
        moved = (x + TAU * v, v + TAU * speed_up, angle + TAU * spin, spin + TAU * spin_up)
        ended = (moved[0].abs() > X_LIMIT) | (moved[2].abs() > ANGLE_LIMIT)
        after = torch.stack([*moved, gravity, cart, pole, length, push], dim=-1)
        return after, torch.ones_like(x), ended

    def draw_task(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the standard physics for every task."""
        return np.tile(np.array(Physics()), (len(u), 1))

    def draw_start(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Draw uniformly in ±0.05, as gymnasium does."""
        return 0.1 * u[..., :4] - 0.05


class DrawnCartPole(CartPole):
    """CartPole where each task has its own physics: each constant times a random factor."""

    def draw_task(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Draw gravity, masses, length and force."""
        return np.array(Physics()) * (LEAST + (MOST - LEAST) * u[:, :5])


class TurnedCartPole(DrawnCartPole):
    """The same, but half of the tasks reverse the force, so that no single policy balances all."""

    def draw_task(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Draw gravity, masses, length, force and the direction of the force."""
        physics = super().draw_task(u)
        physics[:, Physics._fields.index("force")] *= np.where(u[:, 5] < 0.5, -1.0, 1.0)
        return physics
