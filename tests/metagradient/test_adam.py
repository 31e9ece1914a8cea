"""The inner loop's Adam: PyTorch's steps, and the exact derivative through them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from datasets.tasks import Task
from maml.metagradient.differentiate import differentiate
from maml.metagradient.problem import Problem
from maml.metagradient.rules import OPTIMIZERS
from maml.params import Params


@pytest.mark.parametrize("way", ["reverse", "mixed"])
@pytest.mark.parametrize("name", ["adam", "adam0", "adamw"])
def test_the_meta_gradient_is_exact(way: Any, name: str) -> None:
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
        optimizer=name,
        lr=0.05,
        steps=3,
    )
    found = differentiate(problem, Task(x, y, x.flip(0), y.flip(0)), way).gradients.start["w"]

    leaf = start.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    beta1, decay = 0.9 * (name != "adam0"), 0.01 * (name == "adamw")
    for i in range(2):
        w, m, v = leaf, torch.zeros(3).double(), torch.zeros(3).double()
        for t in range(1, 4):
            value, _ = loss({"w": w}, x[i], y[i])
            (g,) = torch.autograd.grad(value, w, create_graph=True)
            m, v = beta1 * m + (1 - beta1) * g, 0.999 * v + 0.001 * g * g
            w = (
                w
                - 0.05 * decay * w
                - 0.05 * (m / (1 - beta1**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            )
        total = total + loss({"w": w}, x[1 - i], y[1 - i])[0]
    (expected,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batching", ["vmap", "tasks"])
def test_a_problem_begins_where_another_ended(batching: Any) -> None:
    """AdamW's 2 + 2 steps: the gradient is that of the last 2, at the state of all 4."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 4, 6, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(1, 4, 6, dtype=torch.float64, generator=generator)
    start = {"w": torch.randn(3, dtype=torch.float64, generator=generator)}
    weights = torch.rand(6, dtype=torch.float64, generator=generator)

    def loss(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        errors = (torch.tanh(x @ params["w"]) - y).square()
        return (params["weights"] * errors).mean(), errors

    def problem(start: Params, begun: int, optimizer: str, **values: Any) -> Problem:
        return Problem(
            start,
            lambda params, task, step: loss(params, task[0][begun + step], task[1][begun + step]),
            lambda params, task, step: loss(params, task[0][0], task[1][0]),
            fixed={"weights": weights}, optimizer=optimizer, lr=0.05, **values,
        )  # fmt: skip

    for name in OPTIMIZERS:
        first = differentiate(
            problem(start, 0, name, steps=2, lives_on=True), (x, y), "auto", batching
        )
        assert first.end is not None
        carried = problem(
            first.end.params, 2, name, steps=2, lives_on=True, snapshots=0,
            optimizer_state=first.end.optimizer_state,
        )  # fmt: skip
        found = differentiate(carried, (x, y), "auto", batching)
        whole = differentiate(problem(start, 0, name, steps=4, lives_on=True), (x, y))
        assert found.end is not None and whole.end is not None
        torch.testing.assert_close(found.end.params, whole.end.params, rtol=1e-12, atol=1e-12)
        if name == "adamw":
            expected = _truncated(loss, start["w"], weights, x[0], y[0])
            torch.testing.assert_close(
                found.gradients.fixed["weights"], expected, rtol=1e-10, atol=1e-12
            )
    with pytest.raises(ValueError, match="give one task"):
        differentiate(carried, (x.expand(2, 4, 6, 3), y.expand(2, 4, 6)))


def _truncated(loss: Any, w: Tensor, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient by the weights through the last 2 of 4 steps of AdamW."""
    leaf = weights.clone().requires_grad_()
    m = v = torch.zeros_like(w)
    w = w.clone().requires_grad_()
    for t in range(1, 5):
        if t == 3:
            w, m, v = w.detach().requires_grad_(), m.detach(), v.detach()
        value, _ = loss({"w": w, "weights": leaf}, x[t - 1], y[t - 1])
        (g,) = torch.autograd.grad(value, w, create_graph=True)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        w = w - 0.05 * (step + 0.01 * w)
    (found,) = torch.autograd.grad(loss({"w": w, "weights": leaf}, x[0], y[0])[0], leaf)
    return found
