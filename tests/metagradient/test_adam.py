"""The inner loop's Adam: PyTorch's steps, and the exact derivative through them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from datasets.tasks import Task
from maml.metagradient.differentiate import differentiate
from maml.metagradient.optimizers import OPTIMIZERS
from maml.metagradient.problem import Problem
from maml.params import Params


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1)),
        ("adam0", lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.999))),
    ],
)
def test_steps_are_pytorch_s(name: str, peer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    theirs = torch.ones(4, dtype=torch.float64, requires_grad=True)
    optimizer, own = peer([theirs]), OPTIMIZERS[name](0.1)
    ours = {"w": torch.ones(4, dtype=torch.float64)}
    state = own.init(ours)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
        updates, state = own.update({"w": gradient}, state, params=ours, inplace=False)
        ours = {"w": ours["w"] + updates["w"]}
        torch.testing.assert_close(ours["w"], theirs.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("way", ["reverse", "mixed"])
@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_the_meta_gradient_is_exact(way: Any, beta1: float) -> None:
    """Of three steps, against algorithm 1 written out in float64: bias corrections are numbers.

    TorchOpt's, which are float32, miss it by more than a thousand times this tolerance.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(2, 6, dtype=torch.float64, generator=generator)

    def loss(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.tanh(x @ params["w"])
        return (outputs - y).square().mean(), outputs

    start = torch.randn(3, dtype=torch.float64, generator=generator)
    problem = Problem(
        {"w": start},
        lambda params, task, step: loss(params, task.support_x, task.support_y),
        lambda params, task, step: loss(params, task.query_x, task.query_y),
        optimizer="adam" if beta1 else "adam0",
        lr=0.05,
        steps=3,
    )
    found = differentiate(problem, Task(x, y, x.flip(0), y.flip(0)), way).gradients.start["w"]

    leaf = start.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(2):
        w, m, v = leaf, torch.zeros(3).double(), torch.zeros(3).double()
        for t in range(1, 4):
            value, _ = loss({"w": w}, x[i], y[i])
            (g,) = torch.autograd.grad(value, w, create_graph=True)
            m, v = beta1 * m + (1 - beta1) * g, 0.999 * v + 0.001 * g * g
            w = w - 0.05 * (m / (1 - beta1**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        total = total + loss({"w": w}, x[1 - i], y[1 - i])[0]
    (expected,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
