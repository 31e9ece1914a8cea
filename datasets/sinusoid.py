"""Sinusoid regression, Finn et al. 2017 (arXiv:1703.03400), section 5.1."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets import addresses
from datasets.episodes import Episodes, check_counts
from datasets.tasks import Task

COMPONENTS = {
    "sinusoid": {
        "help": "regression of sine waves",
        "attribute": "Sinusoid",
        "classifies": False,
        "ignores": {"ways": "has no classes"},
    }
}

AMPLITUDES = (0.1, 5.0)
PHASES = (0.0, math.pi)
INPUTS = (-5.0, 5.0)


class Sinusoid(Episodes):
    """Regress a sine wave from ``shots`` of its points.

    Amplitude is uniform in [0.1, 5], phase in [0, pi], inputs in [-5, 5], without noise. The paper
    leaves the sign of the phase open. The released code evaluates ``amplitude * sin(x - phase)``,
    and so does this class.
    """

    def __init__(
        self,
        split: str,
        *,
        shots: int,
        queries: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        **_unused: object,
    ) -> None:
        """Use ``shots`` support and ``queries`` query points per task; splits differ in draws."""
        check_counts(shots=shots, queries=queries)
        self.split, self.seed, self.dtype = split, seed, dtype
        self.shots, self.queries = shots, queries

    def tasks(self, ids: Tensor) -> Task:
        """Return the tasks with ids int64 ``[B]``: support ``[B, K, 1]``, query ``[B, Q, 1]``."""

        def drawn(purpose: str, n: int) -> NDArray[np.float64]:
            return addresses.uniforms(self.keys(ids, purpose, self.seed), n)

        wave = drawn("wave", 2)
        amplitude = torch.from_numpy(_between(AMPLITUDES, wave[:, :1]))
        phase = torch.from_numpy(_between(PHASES, wave[:, 1:]))

        def points(purpose: str, n: int) -> tuple[Tensor, Tensor]:
            x = torch.from_numpy(_between(INPUTS, drawn(purpose, n)))
            y = amplitude * torch.sin(x - phase)
            return x[..., None].to(self.dtype), y[..., None].to(self.dtype)

        return Task(*points("support", self.shots), *points("query", self.queries))


def _between(bounds: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = bounds
    return low + (high - low) * u
