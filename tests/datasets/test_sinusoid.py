"""Sinusoid tasks lie on the waves that they claim, and the waves in the published ranges."""

from __future__ import annotations

import math

import pytest
import torch

from datasets import DataError
from datasets.sinusoid import Sinusoid


def test_points_lie_on_the_waves():
    e = Sinusoid(split="train", shots=10, queries=7, seed=0, dtype=torch.float64)
    ids = torch.arange(200)
    task, waves = e.tasks(ids), e.waves(ids)
    assert task.support_x.shape == task.support_y.shape == (200, 10, 1)
    assert task.query_x.shape == task.query_y.shape == (200, 7, 1)
    for x, y in ((task.support_x, task.support_y), (task.query_x, task.query_y)):
        wave = waves.amplitude[:, None, None] * torch.sin(x - waves.phase[:, None, None])
        torch.testing.assert_close(y, wave, rtol=1e-12, atol=1e-12)


def test_ranges_are_those_of_the_paper_and_filled_uniformly():
    e = Sinusoid(split="train", shots=5, queries=5, seed=0, dtype=torch.float64)
    ids = torch.arange(20_000)
    waves, task = e.waves(ids), e.tasks(ids)
    for values, low, high in (
        (waves.amplitude, 0.1, 5.0),
        (waves.phase, 0.0, math.pi),
        (task.support_x, -5.0, 5.0),
        (task.query_x, -5.0, 5.0),
    ):
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
        quantiles = torch.quantile(
            values.flatten()[:20_000], torch.tensor([0.25, 0.5, 0.75]).double()
        )
        expected = low + (high - low) * torch.tensor([0.25, 0.5, 0.75]).double()
        assert ((quantiles - expected).abs() < 0.015 * (high - low)).all()
    assert abs(torch.corrcoef(torch.stack([waves.amplitude, waves.phase]))[0, 1]) < 0.03


def test_pure_by_id_and_support_is_not_query():
    e = Sinusoid(split="test", shots=5, queries=5, seed=3)
    together = e.tasks(torch.arange(10))
    for a, b in zip(e.tasks(torch.tensor([6])), together, strict=True):
        assert torch.equal(a[0], b[6])
    assert not torch.equal(together.support_x, together.query_x)
    assert together.support_x.dtype == torch.float32
    # More queries leave the support points alone.
    more = Sinusoid(split="test", shots=5, queries=50, seed=3).tasks(torch.arange(10))
    assert torch.equal(more.support_x, together.support_x)


@pytest.mark.parametrize(("shots", "queries", "flag"), [(0, 1, "--shots 0"), (1, 0, "--queries 0")])
def test_too_few_points_name_the_flag(shots, queries, flag):
    with pytest.raises(DataError, match=flag):
        Sinusoid(split="train", shots=shots, queries=queries, seed=0)
