"""Networks that mix the examples of a set are told from those that do not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maml.networks.mixing import mixes
from maml.networks.ordinary import explicit

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "its mean": lambda x: x - x.mean(0),
    "its greatest": lambda x: x / x.amax(),
    "attention": lambda x: torch.softmax(x @ x.T, -1) @ x,
    "its neighbour": lambda x: x.roll(1, 0),
    "a thousandth of its mean": lambda x: 1e-3 * x.mean(0).expand_as(x),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "each one's mean": lambda x: x - x.mean(-1, keepdim=True),
    "attention in each": lambda x: torch.softmax(x[:, :, None] * x[:, None], -1) @ x[..., None],
}


class Net(nn.Module):
    """A function of a set between two layers; a gate scales its output."""

    def __init__(
        self, do: Callable[[Tensor], Tensor], gate: float = 1.0, masked: float = 0.0
    ) -> None:
        super().__init__()
        self.do, self.gate = do, nn.Parameter(torch.tensor(gate))
        self.masked = masked
        self.first, self.norm, self.head = nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x.flatten(1))))
        hidden: Tensor = self.head(h + self.gate * self.do(h).view_as(h))
        return hidden + torch.where(torch.arange(5) == 4, self.masked, 0.0)


X = torch.rand(30, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("what", "gate", "expected"),
    [
        *((what, gate, True) for what in MIXING for gate in (1.0, 0.0)),
        *((what, 1.0, False) for what in APART),
    ],
)
def test_a_set_and_its_halves_tell(what: str, gate: float, expected: bool) -> None:
    """Next to a batch norm, whose statistics are returned; also with a gate that is closed."""
    torch.manual_seed(0)
    assert mixes(explicit(Net((MIXING | APART)[what], gate), "x"), X) is expected


@pytest.mark.parametrize("masked", [-1e5, 1e4, -torch.inf])
def test_a_large_output_or_a_masked_class_hides_nothing(masked: float) -> None:
    for what, expected in (("its mean", True), ("nothing", False)):
        assert mixes(explicit(Net((MIXING | APART)[what], masked=masked), "x"), X) is expected


def test_what_is_made_of_torch_s_own_modules_is_asked_too() -> None:
    layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 5), nn.Softmax(0))
    x = torch.randn(10, 4)
    assert mixes(explicit(layers, "x"), x)
    assert not mixes(explicit(layers[:3], "x"), x)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_asking_leaves_no_trace() -> None:
    network = explicit(Counting().double(), "x")
    assert not mixes(network, torch.randn(10, 4, dtype=torch.float64))
    assert not dict(network.named_buffers())["module.calls"]
