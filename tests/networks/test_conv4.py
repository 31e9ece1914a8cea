"""MAML's networks against plain PyTorch, and their initial weights against what was published."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maml.networks import build_network
from maml.networks.statistics import BatchNorm, normalise
from tests.metagradient.peer import randn

EPS = 1e-3
"""Of the batch normalisation of MAML's released code."""


def build(name: str = "conv4", side: int = 28, ways: int = 5, filters: int = 64) -> Any:
    torch.manual_seed(0)
    return build_network(name, image_shape=(1, side, side), ways=ways, filters=filters)


# ---- forward ----------------------------------------------------------------------------------


def test_normalises_by_the_batch_at_hand_or_given_statistics() -> None:
    """At a scale of 0.03 the variance is about as large as ε, so ε has an effect."""
    norm, x = BatchNorm(4).double(), 0.03 * randn(6, 4, 5, 5, seed=1) + 3
    # Neither scale nor shift has its initial value.
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    found, (mean, variance) = norm(x, None)
    expected = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=EPS)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    by_channel = x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, by_channel.mean(1))
    torch.testing.assert_close(variance, by_channel.var(1, correction=0))
    mean, variance = randn(4, seed=1), (0.03 * randn(4, seed=1)).square()
    found, used = norm(x, (mean, variance))
    expected = F.batch_norm(x, mean, variance, norm.weight, norm.bias, training=False, eps=EPS)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert used[0] is mean and used[1] is variance


def test_the_norm_and_its_statistics_have_two_derivatives() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def by(x: Tensor, *of_layer: Tensor | None) -> tuple[Tensor, ...]:
        found, used = normalise(x, None, *(of_layer or (None, None)), 1e-3)
        return found, *used

    for given in ((x, weight, bias), (x,)):
        assert torch.autograd.gradcheck(by, given)
        assert torch.autograd.gradgradcheck(by, given)


@pytest.mark.parametrize(
    ("name", "side", "filters", "features"),
    [("conv4", 28, 64, 64), ("conv4-flat", 28, 64, 256), ("conv4-pool", 84, 32, 800)],
)
def test_four_blocks_and_a_head(name: str, side: int, filters: int, features: int) -> None:
    """Strided and averaged, or flattened (2×2 of 28×28); or pooled and flattened (5×5 of 84×84).

    Learners' tests write these networks out.
    """
    network = build(name, side, filters=filters)
    assert [block.conv.weight.shape[0] for block in network.blocks] == [filters] * 4
    assert network.head.weight.shape == (5, features)
    assert network(torch.rand(3, 1, side, side))[0].shape == (3, 5)


# ---- initial weights: 10⁵ draws, so a moment is right to 1 % -----------------------------------


def test_a_head_begins_as_a_truncated_normal() -> None:
    """σ = 0.01, drawn again beyond 2σ, as in MAML's released code; biases are zero."""
    network = build("conv4", 32, ways=2000)
    weights = network.head.weight.detach()
    assert weights.numel() > 1e5
    assert 0.0199 < weights.abs().max() <= 0.02
    # The variance within 2σ is smaller: σ² (1 - 4 φ(2) / (2 Φ(2) - 1)); the mean is zero. Of a
    # uniform distribution, half would be within 1σ.
    assert weights.std().item() == pytest.approx(0.0087962, rel=0.01)
    assert abs(weights.mean().item()) < 1e-4
    assert (weights.abs() < 0.01).double().mean().item() == pytest.approx(0.7152, rel=0.01)
    assert not network.head.bias.any()


def test_convolutions_begin_as_xavier_s() -> None:
    """Uniform within √(6 / (fan in + fan out)), Glorot and Bengio 2010; biases are zero."""
    network = build("conv4-pool", filters=128)
    for i, block in enumerate(network.blocks):
        weights = block.conv.weight.detach()
        bound = math.sqrt(6 / (9 * (1 if i == 0 else 128) + 9 * 128))
        # The first block has a thousand weights, the others a hundred times as many.
        error = 0.1 if i == 0 else 0.01
        assert (1 - error) * bound < weights.abs().max() <= bound
        assert weights.std().item() == pytest.approx(bound / math.sqrt(3), rel=error)
        assert weights.abs().mean().item() == pytest.approx(bound / 2, rel=error)
        assert not block.conv.bias.any() and not block.norm.bias.any()
        assert (block.norm.weight == 1).all()
