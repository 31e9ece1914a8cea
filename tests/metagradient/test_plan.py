"""Networks that ``torch.func.vmap`` cannot batch, or batches wrongly, get a loop's gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import maml
from maml.params import Params
from tests.metagradient.peer import by_hand

TASKS, EXAMPLES, LR = 3, 5, 0.5
Tasks = dict[str, Tensor]


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.words(x)).mean(1)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Layer(nn.Module):
    """A linear layer and a norm, and then a function of their output."""

    def __init__(self, then: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.then = nn.Linear(4, 4), nn.LayerNorm(4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.norm(torch.tanh(self.layer(x))))


def without_gradient(_: Layer, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.norm(dim=1, keepdim=True)
    return h / (1 + scale)


def hooked(_: Layer, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)
    return h * 1


def lowered(layer: Layer, h: Tensor) -> Tensor:
    return torch.ops.aten.layer_norm(h, [4], layer.norm.weight, layer.norm.bias)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0][:, -1]


WORDS, POINTS, ROWS = "words", (4,), (6, 4)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "padding": (lambda: Embedded(padding_idx=0), WORDS),
    "frequencies": (lambda: Embedded(scale_grad_by_freq=True), WORDS),
    "no_grad": (lambda: Layer(without_gradient), POINTS),
    "detach": (lambda: Layer(lambda _, h: h / (1 + h.detach().norm(dim=1, keepdim=True))), POINTS),
    "data": (lambda: Layer(lambda _, h: h / (1 + h.data.norm(dim=1, keepdim=True))), POINTS),
    "hook": (lambda: Layer(hooked), POINTS),
    "sparse rows": (lambda: Embedded(sparse=True), WORDS),
    "a lowered norm": (lambda: Layer(lowered), POINTS),
    "if": (lambda: Layer(lambda _, h: torch.tanh(h) if h.mean() > 0 else h.exp()), POINTS),
    "a function": (lambda: Layer(lambda _, h: Cubed.apply(h)), POINTS),
    "a checkpoint": (lambda: Layer(lambda _, h: checkpoint(torch.tanh, h, use_reentrant=False)),
                     POINTS),
    "weight norm": (lambda: weight_norm(nn.Linear(4, 4), dim=None), POINTS),
    "lstm": (lambda: Recurrent(nn.LSTM), ROWS),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tasks]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = nn.Sequential(make(), nn.Linear(4, 3)).double()

    def examples() -> Tensor:
        if shape == WORDS:
            # Only the last task has padding.
            found = torch.randint(1, 8, (TASKS, EXAMPLES, 6))
            found[-1, :, :2] = torch.tensor([0, 8])
            return found
        return torch.randn(TASKS, EXAMPLES, *shape, dtype=torch.float64)

    labels = torch.randint(0, 3, (2, TASKS, EXAMPLES))
    return network, {"sx": examples(), "sy": labels[0], "qx": examples(), "qy": labels[1]}


def loss(network: nn.Module, part: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def of_part(params: Params, task: Tasks, step: int = 0) -> tuple[Tensor, Tensor]:
        outputs = torch.func.functional_call(network, params, (task[f"{part}x"],))
        labels = task[f"{part}y"]
        # Forward mode could not square a constant error; nothing here needs it.
        squared = F.mse_loss(outputs.softmax(-1), F.one_hot(labels, 3).to(outputs.dtype))
        return F.cross_entropy(outputs, labels) + squared, outputs

    return of_part


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "auto") for name in NETWORKS),
        *((name, way) for name in ("padding", "if", "lstm") for way in ("reverse", "mixed")),
    ],
)
def test_equals_a_loop(name: str, way: Any) -> None:
    network, tasks = made(name)
    params = dict(network.named_parameters())
    for order in ("second", "first"):
        state = stating(network, 2, order)
        with sdpa_kernel(SDPBackend.MATH):
            expected = by_hand(state(params), tasks).gradients.start
        found = maml.meta_gradient(state, params, tasks, way)
        for parameter, gradient in expected.items():
            ours, plain = found.gradients[parameter].to_dense(), gradient.to_dense()
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12, msg=parameter)


@pytest.mark.parametrize(
    ("draw", "steps"),
    [
        (lambda _, h: h * float(np.random.rand()), 2),
        (lambda _, h: h * random.random(), 2),
        (lambda _, h: F.dropout(h, 0.2), 2),
        (lambda _, h: F.dropout(h, 0.2), 9),  # more than are remembered for the way back
    ],
)
def test_draws_differ_by_call_task_and_step_and_follow_the_seed(draw: Any, steps: int) -> None:
    network = nn.Sequential(Layer(draw), nn.Linear(4, 3)).double()
    tasks = made("no_grad")[1]

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return gradient_of(network, tasks, steps)

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.allclose(gradient(1), gradient(2))
    torch.manual_seed(1)
    assert not torch.allclose(
        gradient_of(network, tasks, steps), gradient_of(network, tasks, steps)
    )
    one = {name: tensor[:1].repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in tasks.items()}
    found = maml.meta_gradient(stating(network, steps), dict(network.named_parameters()), one)
    assert found.losses[0] != found.losses[1]


def stating(
    network: nn.Module, steps: int, order: str = "second"
) -> Callable[[Params], maml.Problem]:
    losses = loss(network, "s"), loss(network, "q")
    return lambda params: maml.Problem(params, *losses, lr=LR, steps=steps, order=order)


def gradient_of(network: nn.Module, tasks: Tasks, steps: int) -> Tensor:
    params = dict(network.named_parameters())
    return maml.meta_gradient(stating(network, steps), params, tasks).gradients["0.layer.weight"]


def test_a_single_task_is_refused() -> None:
    task = maml.episodes("glyphs", "test", ways=2, shots=1, queries=1).task(0)
    with pytest.raises(ValueError, match=r"a single task.*episodes\.tasks\(\[0\]\)"):
        maml.meta_gradient(lambda _: pytest.fail("the problem was stated"), {}, task)
    x = torch.ones(3, 2)
    for tasks in ((x, x[:2]), (x, x.numpy()), (x, 1.0)):
        with pytest.raises(ValueError, match=r"nest of tensors \[B, …\] alone"):
            maml.meta_gradient(lambda _: pytest.fail("the problem was stated"), {}, tasks)


NETWORK: nn.Module = nn.Identity()


def of_global(params: Params) -> maml.Problem:
    return stating(NETWORK, 2)(params)


class Own:
    network: nn.Module

    def state(self, params: Params) -> maml.Problem:
        return stating(self.network, 2)(params)


def test_problems_are_told_apart_by_what_their_losses_read() -> None:
    """One function may read another network at each call; each network is tried for itself."""
    own = Own()
    box: dict[str, nn.Module] = {}

    def boxed(params: Params) -> maml.Problem:
        return stating(box["network"], 2)(params)

    for name in ("no_grad", "hook", "if", "no_grad", "hook"):
        network, tasks = made(name)
        globals()["NETWORK"] = box["network"] = own.network = network
        for state in (of_global, boxed, own.state):
            params, weight = dict(network.named_parameters()), "0.layer.weight"
            ours = maml.meta_gradient(state, params, tasks).gradients[weight]
            plain = by_hand(stating(network, 2)(params), tasks).gradients.start[weight]
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def test_a_network_s_mode_tells_problems_apart() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).double().eval()
    tasks, params = made("no_grad")[1], dict(network.named_parameters())
    tested = maml.meta_gradient(stating(network, 1), params, tasks).losses
    assert torch.equal(maml.meta_gradient(stating(network, 1), params, tasks).losses, tested)
    network.train()
    assert not torch.equal(maml.meta_gradient(stating(network, 1), params, tasks).losses, tested)
    network[1] = nn.Dropout(0.0)
    assert torch.equal(maml.meta_gradient(stating(network, 1), params, tasks).losses, tested)
    network[1].p = 0.5  # known as batched until it draws
    assert not torch.equal(maml.meta_gradient(stating(network, 1), params, tasks).losses, tested)
