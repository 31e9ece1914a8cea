"""The points of a sinusoid task lie on one wave, and the waves have the published ranges."""

import math

import pytest
import torch

from datasets import DataError
from datasets.sinusoid import Sinusoid


def test_waves_are_those_of_the_paper_and_drawn_uniformly():
    e = Sinusoid(split="train", shots=10, queries=7, seed=0, dtype=torch.float64)
    task = e.tasks(torch.arange(20_000))
    assert task.support_x.shape == task.support_y.shape == (20_000, 10, 1)
    assert task.query_x.shape == task.query_y.shape == (20_000, 7, 1)
    # Fit amplitude and phase to a task's points: y = a·cos(phase)·sin(x) − a·sin(phase)·cos(x).
    x = torch.cat([task.support_x, task.query_x], dim=1)
    y = torch.cat([task.support_y, task.query_y], dim=1)
    basis = torch.cat([torch.sin(x), -torch.cos(x)], dim=2)
    parts = torch.linalg.lstsq(basis, y).solution
    torch.testing.assert_close(basis @ parts, y, rtol=1e-9, atol=1e-9)
    amplitude, phase = parts.norm(dim=(1, 2)), torch.atan2(parts[:, 1, 0], parts[:, 0, 0])
    for values, low, high in ((amplitude, 0.1, 5.0), (phase, 0.0, math.pi), (x, -5.0, 5.0)):
        assert low - 1e-9 <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high + 1e-9
        at = torch.tensor([0.25, 0.5, 0.75]).double()
        quantiles = torch.quantile(values.flatten()[:20_000], at)
        assert ((quantiles - low - (high - low) * at).abs() < 0.015 * (high - low)).all()
    assert abs(torch.corrcoef(torch.stack([amplitude, phase]))[0, 1]) < 0.03


def test_support_is_not_query_and_each_has_a_point():
    def opened(shots, queries):
        return Sinusoid(split="test", shots=shots, queries=queries, seed=3)

    together, more = (opened(5, queries).tasks(torch.arange(10)) for queries in (5, 50))
    assert not torch.equal(together.support_x, together.query_x)
    assert together.support_x.dtype == torch.float32
    assert torch.equal(more.support_x, together.support_x)
    for counts, flag in (((0, 1), "shots"), ((1, 0), "queries")):
        with pytest.raises(DataError, match=f"--{flag} 0: must be at least 1"):
            opened(*counts)
