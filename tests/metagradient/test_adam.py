"""The inner loop's optimizers: the exact derivative through the published steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maml.metagradient.differentiate import differentiate
from maml.metagradient.problem import Problem
from maml.metagradient.rules import OPTIMIZERS
from maml.params import Params

GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(2, 4, 6, 3, dtype=torch.float64, generator=GENERATOR)
Y = torch.randn(2, 4, 6, dtype=torch.float64, generator=GENERATOR)
START = {"w": torch.randn(3, dtype=torch.float64, generator=GENERATOR)}
WEIGHTS = torch.rand(6, dtype=torch.float64, generator=GENERATOR)


def loss(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    errors = (torch.tanh(x @ params["w"]) - y).square()
    return (params["weights"] * errors).mean(), errors


def problem(start: Params, begun: int, optimizer: str, **values: Any) -> Problem:
    """Return a problem with other examples for each step; the first are the query set, too."""
    return Problem(
        start,
        lambda params, task, step: loss(params, task[0][begun + step], task[1][begun + step]),
        lambda params, task, step: loss(params, task[0][0], task[1][0]),
        fixed={"weights": WEIGHTS}, optimizer=optimizer, lr=0.05, **values,
    )  # fmt: skip


def by_hand(name: str, begun: int, steps: int, n_tasks: int) -> tuple[Tensor, Tensor]:
    """Return gradients by start and weights of the steps after ``begun``; Adam by algorithm 1."""
    weights = WEIGHTS.clone().requires_grad_()
    leaves: list[Tensor] = []
    beta1, decay = 0.9 * (name != "adam0"), 0.01 * (name == "adamw")
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(X[:n_tasks], Y[:n_tasks], strict=True):
        w = START["w"].clone().requires_grad_()
        m = v = torch.zeros_like(w)
        for t in range(1, steps + 1):
            if t == begun + 1:
                w, m, v = w.detach().requires_grad_(), m.detach(), v.detach()
                leaves.append(w)
            value, _ = loss({"w": w, "weights": weights}, x[t - 1], y[t - 1])
            (g,) = torch.autograd.grad(value, w, create_graph=True)
            if name in ("sgd", "momentum"):  # as torch.optim.SGD
                m = g + (0.9 * m if name == "momentum" else 0)
                w = w - 0.05 * m
                continue
            m, v = beta1 * m + (1 - beta1) * g, 0.999 * v + 0.001 * g * g
            step = (m / (1 - beta1**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            w = w - 0.05 * (step + decay * w)
        total = total + loss({"w": w, "weights": weights}, x[0], y[0])[0]
    *by_start, by_weights = torch.autograd.grad(total, [*leaves, weights])
    return torch.stack(by_start).sum(0), by_weights


@pytest.mark.parametrize("way", ["reverse", "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_meta_gradient_is_exact(way: Any, name: str) -> None:
    """Through three steps in float64, because bias corrections are Python numbers.

    TorchOpt's corrections are float32: its error is over a thousand times this tolerance.
    """
    found = differentiate(problem(START, 0, name, steps=3), (X, Y), way).gradients
    expected = by_hand(name, 0, 3, n_tasks=2)
    torch.testing.assert_close(
        (found.start["w"], found.fixed["weights"]), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("batching", ["vmap", "tasks"])
def test_a_problem_begins_where_another_ended(batching: Any) -> None:
    """AdamW's 2 + 2 steps: the gradient is that of the last 2, at the state of all 4."""
    one = X[:1], Y[:1]
    for name in OPTIMIZERS:
        begun = problem(START, 0, name, steps=2, lives_on=True)
        first = differentiate(begun, one, "auto", batching)
        assert first.end is not None
        carried = problem(
            first.end.params, 2, name, steps=2, lives_on=True, snapshots=0,
            optimizer_state=first.end.optimizer_state,
        )  # fmt: skip
        found = differentiate(carried, one, "auto", batching)
        whole = differentiate(problem(START, 0, name, steps=4, lives_on=True), one)
        assert found.end is not None and whole.end is not None
        torch.testing.assert_close(found.end.params, whole.end.params, rtol=1e-12, atol=1e-12)
        if name == "adamw":
            _, expected = by_hand(name, 2, 4, n_tasks=1)
            by_weights = found.gradients.fixed["weights"]
            torch.testing.assert_close(by_weights, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="give one task"):
        differentiate(carried, (X, Y))
