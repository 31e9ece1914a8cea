"""Tasks that get their data by acting: environments as tensors, and all their random numbers.

A data set of this kind gives the first states of environments, and the uniform numbers that will
draw the actions. A policy then acts. States and numbers depend only on (seed, split, id).

Shape legend, in addition to that of :mod:`datasets.tasks`:

=====  ==========================================================
``E``  episodes or environments in parallel
``R``  first states of one environment, used one after the other
``T``  steps
``S``  numbers in a state; ``P`` of them are its task's physics
``O``  numbers in an observation
``D``  uniform numbers that draw one action
=====  ==========================================================
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets import addresses
from datasets.episodes import Episodes, check_counts
from datasets.errors import DataError
from datasets.tasks import Task


class Environment(ABC):
    """Dynamics as a pure function of tensors: any number of environments at once.

    A state holds what moves and its task's physics (or goal), so a state describes everything. If
    ``discrete``, an action is one of ``outputs``; if not, a point with ``outputs`` coordinates.
    """

    state_size: ClassVar[int]  # S
    observation_size: ClassVar[int]  # O
    outputs: ClassVar[int]  # numbers that a policy outputs for an observation
    draws: ClassVar[int]  # D
    discrete: ClassVar[bool]

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Return what a policy sees of ``state [..., S]``: ``[..., O]``, in the state's dtype."""

    @abstractmethod
    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Act once: ``state [..., S]``, ``action`` int64 ``[...]`` or float ``[..., outputs]``.

        Return the next state, the reward ``[...]`` and whether the episode ended, bool ``[...]``.
        """

    @abstractmethod
    def draw_task(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the physics of tasks from uniform numbers ``[B, S]``: ``[B, P]``."""

    @abstractmethod
    def draw_start(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the start of what moves, from uniforms ``[..., S]``: ``[..., S - P]``."""


class Acting(Episodes):
    """Tasks to act in: addresses determine physics, first states and uniform numbers.

    ``support_x`` holds first states ``[B, K, R, S]`` of the support episodes. ``support_y`` holds
    their uniform numbers ``[B, K, T, D]``. ``query_x`` and ``query_y`` hold those of the query
    episodes. All are float64, because a fall must not depend on ``--dtype``.
    """

    def __init__(
        self,
        environment: Environment,
        split: str,
        *,
        shots: int,
        queries: int,
        horizon: int,
        seed: int,
        starts: int = 1,
        **_unused: object,
    ) -> None:
        """``starts`` is R. Raise :class:`DataError` for counts below 1; ``shots`` may be 0."""
        check_counts(queries=queries, horizon=horizon)
        if shots < 0:
            raise DataError(f"--shots {shots}: must be at least 0")
        self.environment = environment
        self.split, self.seed = split, seed
        self.shots, self.queries, self.horizon, self.starts = shots, queries, horizon, starts

    def tasks(self, ids: Tensor) -> Task:
        """Return the tasks with these ids (int64 ``[B]``), before any action."""
        keys = self.keys(ids, "physics", self.seed)
        draws = addresses.uniforms(keys, self.environment.state_size)
        physics = self.environment.draw_task(draws)  # [B, P]
        support = self._episodes(ids, "support", self.shots, physics)
        return Task(*support, *self._episodes(ids, "query", self.queries, physics))

    def _episodes(
        self, ids: Tensor, purpose: str, n: int, physics: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        environment = self.environment
        # Two keys for each episode: one for its first states, one for its uniform numbers.
        keys = addresses.derive(self.keys(ids, purpose, self.seed), 2 * n).reshape(len(ids), n, 2)
        size = environment.state_size
        first = addresses.uniforms(keys[..., 0], self.starts * size)
        moving = environment.draw_start(first.reshape(len(ids), n, self.starts, size))
        same = np.broadcast_to(physics[:, None, None], (*moving.shape[:-1], physics.shape[-1]))
        draws = addresses.uniforms(keys[..., 1], self.horizon * environment.draws)
        return (
            torch.from_numpy(np.concatenate([moving, same], axis=-1)),
            torch.from_numpy(draws.reshape(len(ids), n, self.horizon, environment.draws)),
        )


class Trajectory(NamedTuple):
    """Every step of E environments; a field without a shape below is ``[..., E, T]``."""

    observations: Tensor  # [..., E, T, O]
    actions: Tensor  # int64, or float [..., E, T, outputs]
    rewards: Tensor  # 0 where alive is 0
    ends: Tensor  # 1 where a step ended an episode, by a fall or by the time limit
    alive: Tensor  # 1 until an environment's last episode has ended, then 0


def play(
    environment: Environment,
    first: Tensor,
    draws: Tensor,
    choose: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
) -> Trajectory:
    """Act through T steps in all environments at once.

    ``first`` is ``[..., E, R, S]`` and ``draws [..., E, T, D]``; ``choose(observations [..., E, O],
    draws [..., E, D])`` returns actions. After an episode, its environment continues from the next
    of the R first states. After the last, it stands still and its steps are zeros.
    """
    state, starts, horizon = first[..., 0, :].clone(), first.shape[-2], draws.shape[-2]
    start = torch.zeros(state.shape[:-1], dtype=torch.int64, device=first.device)
    alive = torch.ones(state.shape[:-1], dtype=torch.bool, device=first.device)
    rows: list[tuple[Tensor, ...]] = []
    for drawn in draws.unbind(-2):
        # Check only every 16 steps, because each check makes the GPU wait.
        if len(rows) % 16 == 0 and not bool(alive.any()):
            break
        seen = environment.observe(state)
        actions = choose(seen, drawn)
        after, reward, ended = environment.step(state, actions)
        ended = ended & alive
        if len(rows) + 1 == horizon:
            # The time limit ends an episode that began at step 0. It only cuts a later one.
            ended = ended | (alive & (start == 0))
        done = actions * (alive if environment.discrete else alive[..., None])
        rows.append((seen * alive[..., None], done, reward * alive, ended, alive))
        start = start + ended
        alive = alive & (start < starts)
        index = start.clamp(max=starts - 1)[..., None, None]
        following = first.gather(-2, index.expand(*index.shape[:-1], after.shape[-1])).squeeze(-2)
        state = torch.where(
            alive[..., None], torch.where(ended[..., None], following, after), state
        )
    nobody = tuple(torch.zeros_like(part) for part in rows[-1])
    rows += [nobody] * (horizon - len(rows))
    observations, actions, *rest = (
        torch.stack(part, dim=start.dim()) for part in zip(*rows, strict=True)
    )
    if actions.is_floating_point():
        actions = actions.to(dtype)
    return Trajectory(observations.to(dtype), actions, *(part.to(dtype) for part in rest))
