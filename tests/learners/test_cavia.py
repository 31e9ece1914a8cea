"""CAVIA against networks that take their context in other ways, and by hand."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from maml.errors import UserError
from maml.metagradient.problem import Problem
from maml.params import Params
from tests.compiler import needs_compiler
from tests.metagradient.peer import by_hand, losses_of
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12])


GLYPHS, SINUSOID = "maml-glyphs-5way-1shot", "maml-sinusoid-10shot"
make_worker = partial(worker_of, learner="cavia", filters=8, inner_steps=2, context=6, inner_lr=1.0)


def film(leaves: Params, context: Tensor, x: Tensor) -> Tensor:
    """The network with FiLM written out between the third batch norm and its ReLU."""
    for i in range(4):
        block = f"network.blocks.{i}."
        conv, norm = block + "conv.", block + "norm."
        x = F.conv2d(x, leaves[conv + "weight"], leaves[conv + "bias"], stride=2, padding=1)
        x = F.batch_norm(
            x, None, None, leaves[norm + "weight"], leaves[norm + "bias"], training=True, eps=1e-3
        )
        if i == 2:
            scale, shift = (leaves["modulation"] @ context).chunk(2)
            x = (1 + scale[:, None, None]) * x + shift[:, None, None]
        x = F.relu(x)
    head = (leaves["network.head.weight"], leaves["network.head.bias"])
    return F.linear(x.mean((2, 3)), *head)


def appended(leaves: Params, context: Tensor, x: Tensor) -> Tensor:
    """The regression network with the context appended to its input."""
    names = [f"network.layers.{i}." for i in range(3)]
    first = torch.cat([leaves[names[0] + "weight"], leaves["modulation"]], dim=1)
    x = torch.cat([x, context.expand(len(x), -1)], dim=1)
    x = F.relu(F.linear(x, first, leaves[names[0] + "bias"]))
    x = F.relu(F.linear(x, leaves[names[1] + "weight"], leaves[names[1] + "bias"]))
    return F.linear(x, leaves[names[2] + "weight"], leaves[names[2] + "bias"])


@pytest.mark.parametrize(
    ("preset", "network", "meta_gradient", "kernels"),
    [
        (GLYPHS, film, "reverse", "torch"),
        pytest.param(GLYPHS, film, "auto", "native", marks=needs_compiler),
        (SINUSOID, appended, "mixed", "torch"),
    ],
)
def test_equals_a_walk_by_hand(
    preset: str, network: Callable[..., Tensor], meta_gradient: str, kernels: str
) -> None:
    worker = make_worker(preset, meta_gradient=meta_gradient, kernels=kernels)
    worker.learner.prepare(torch.device("cpu"))  # refuses what kernels do not serve
    params = worker.learner.meta_parameters()
    problem = Problem(
        {"context": torch.zeros(6, dtype=torch.float64)},
        **losses_of(lambda at, x, _: network(at, at["context"], x), worker.learner.objective.loss),
        fixed=params, lr=1.0, steps=2,
    )  # fmt: skip
    expected = by_hand(problem, worker.training.tasks(IDS)).gradients.fixed
    found = worker.share(params, IDS, worker.learner)
    assert found.gradients["modulation"].abs().max() > 1e-6
    torch.testing.assert_close(found.gradients, expected, rtol=1e-9, atol=1e-10)


class Ordinary(nn.Module):
    """A user's own network, which names the layer that takes the context."""

    context_layer = "norm"

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


class Nowhere(Ordinary):
    context_layer = "nrom"


def test_a_network_of_ones_own_says_where_it_goes() -> None:
    """It names a layer of its own class."""
    worker = make_worker(GLYPHS, network=f"{__name__}:Ordinary")
    params = worker.learner.meta_parameters()
    assert params["modulation"].shape == (8, 6)
    found = worker.share(params, IDS, worker.learner)
    assert found.gradients["modulation"].abs().max() > 1e-6
    with pytest.raises(UserError, match="its context_layer, nrom, is no batch norm with a scale"):
        make_worker(GLYPHS, network=f"{__name__}:Nowhere")
    with pytest.raises(UserError, match="--network lenet does not say where a context goes"):
        make_worker(GLYPHS, network="lenet")


@pytest.mark.parametrize("layer", ["0", "2", "3"])
def test_a_layer_may_share_its_bias_and_have_two_names(layer: str) -> None:
    """The context changes this layer alone."""
    losses = []
    for tied in (True, False):
        torch.manual_seed(0)
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        other.bias = one.bias if tied else nn.Parameter(one.bias.detach().clone())
        network = nn.Sequential(one, nn.Tanh(), other, other)
        network.context_layer = layer  # type: ignore[assignment]
        x, y = torch.randn(6, 4), torch.arange(6) % 4
        losses.append(maml.CAVIA(network, inner_lr=1.0, context=4)([(x, y, x, y)]))
    assert losses[0] == losses[1]
