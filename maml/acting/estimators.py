"""A surrogate of the expected return whose derivatives are policy gradients, of any order.

Shape legend: E episodes, T steps. An episode that has ended has rewards 0 and log-probabilities 0.
The expected discounted return is J(θ) = E[Σ_t γ^t r_t].
"""

from __future__ import annotations

import torch
from torch import Tensor


def dice(logp: Tensor, rewards: Tensor, weights: Tensor) -> Tensor:
    """DiCE (Foerster et al. 2018, arXiv:1802.05098), equations 5 and 10.

    Its value is the return, and each of its derivatives estimates that of J without bias: what
    was done up to step t, not after, has its part in the reward of step t.

    Args:
        logp: ``[E, T]``, of the actions that were taken.
        rewards: ``[E, T]``, discounted already.
        weights: ``[E]``, adding up to 1: 1/E for episodes that were drawn.

    Returns:
        A scalar.
    """
    reward = (_magic(logp.cumsum(-1)) * rewards).sum(-1)
    # Zero in value; in expectation, so are its derivatives.
    baseline = ((1 - _magic(logp)) * _baseline(rewards, weights)).sum(-1)
    return weights @ (reward + baseline)


def _magic(x: Tensor) -> Tensor:
    """One, whose derivative is that of x times itself."""
    return torch.exp(x - x.detach())


def _to_go(rewards: Tensor) -> Tensor:
    """Return the sum of rewards from each step on: ``[E, T]``."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def _baseline(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return what the other episodes get from each step on, in their mean: ``[E, T]``.

    Of the others alone: with its own return an episode's baseline would depend on its actions, and
    the estimate would be biased. A single episode has none.
    """
    to_go = _to_go(rewards)
    if len(weights) == 1:
        return torch.zeros_like(to_go)
    own = weights[:, None]
    return (weights @ to_go - own * to_go) / (1 - own)
