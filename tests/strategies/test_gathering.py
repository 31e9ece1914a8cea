"""The calls of a step that wait at a worker, and the one node of the graph that answers them."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from maml.strategies.gathering import Gathering
from maml.strategies.packing import OuterLosses, Packing
from maml.worker import Share


def test_calls_in_any_order_are_one_batch_in_order() -> None:
    """Two steps at once, their calls and parameters on threads of their own, in random orders."""
    batches = []

    def compute(places: list[int], shared: float) -> list[tuple[int, float]]:
        batches.append((places, shared))
        return [(place, shared) for place in places]

    for seed in range(20):
        batches.clear()
        gathering = Gathering(compute)
        calls = [partial(gathering.call, step, task) for step in (1, 2) for task in range(9)]
        begins = [partial(gathering.begin, step, 0.5 * step, 9) for step in (1, 2)]
        todo: list[Callable[[], Any]] = [*calls, *begins]
        random.Random(seed).shuffle(todo)
        with ThreadPoolExecutor(len(todo)) as pool:
            done = {one: pool.submit(one) for one in todo}
        both = [(list(range(9)), 0.5), (list(range(9)), 1.0)]
        assert sorted(batches, key=lambda batch: batch[1]) == both
        for one in calls:
            step, task = one.args
            assert done[one].result().wait() == (task, 0.5 * step)


def test_outer_losses_are_those_of_autograd() -> None:
    """Tasks whose losses are (w · x)² for x of their own, float64; a mean, and a sum."""
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)

    @torch.enable_grad()
    def share() -> Share:
        w = flat.detach().requires_grad_()
        losses = (x @ w).square()
        (gradient,) = torch.autograd.grad(losses.sum(), w)
        rows = losses.detach()[:, None]
        return Share({"w": gradient}, rows.sum(0), len(x), rows)

    for weight in (0.25, 1.0):
        rows = OuterLosses.apply(share, Packing({"w": flat}, 1), flat)
        losses = (x @ flat).square()
        assert torch.equal(rows, torch.stack([losses, torch.ones_like(losses)], dim=1))
        (found,) = torch.autograd.grad(weight * rows[:, 0].sum(), flat, retain_graph=True)
        (expected,) = torch.autograd.grad(weight * losses.sum(), flat)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="must all weigh the same"):
        rows[0, 0].backward()
