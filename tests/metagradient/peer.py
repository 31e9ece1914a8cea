"""Oracles that compute task by task: learn2learn's learners, and a loop of plain autograd."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.tasks import Task
from maml.metagradient.problem import Outer, Problem
from maml.params import Params


def oracle(name: str, room: str = "algorithms") -> Any:
    """Return learn2learn's ``name``; skip the calling test if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        algorithms = pytest.importorskip(
            f"learn2learn.{room}", reason="pip has no learn2learn for this Python, uv has"
        )
    return getattr(algorithms, name)


def losses_of(
    outputs: Callable[[Params, Tensor, int], Tensor], loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Return the losses of a `Problem`, of outputs for (parameters, examples, step)."""

    def of(part: str) -> Any:
        def of_part(params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
            found = outputs(params, getattr(task, f"{part}_x"), step)
            return loss(found, getattr(task, f"{part}_y")), found

        return of_part

    return {"support": of("support"), "query": of("query")}


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def assert_near(found: Params, wanted: Params, within: float = 1e-10) -> None:
    """Compare by name, relative to a tensor's largest element if that is above 1."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = max(1.0, tensor.detach().abs().max().item())
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=within * scale, msg=name)


def update(problem: Problem, weights: Params, gradients: Params, state: dict[str, Any]) -> Params:
    """An inner optimizer's update without its rate, as published; ``state`` is changed."""
    name = problem.optimizer
    t = state["t"] = state.get("t", 0) + 1
    found = {}
    for key, g in gradients.items():
        m, v = state.get(key, (0.0, 0.0))
        if name in ("sgd", "momentum"):  # as torch.optim.SGD
            m = found[key] = g + problem.momentum * (name == "momentum") * m
        else:  # Adam, by algorithm 1
            g = torch.where(g == 0, 1e-16, g)  # √0 has no slope
            beta1 = 0.9 * (name != "adam0")
            m, v = beta1 * m + (1 - beta1) * g, 0.999 * v + 0.001 * g * g
            found[key] = (m / (1 - beta1**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            found[key] = found[key] + 0.01 * (name == "adamw") * weights[key]
        state[key] = m, v
    return found


def by_hand(problem: Problem, tasks: Any, begun: dict[str, Any] | None = None) -> Outer:
    """The inner loop written out with plain autograd, task by task: see `Problem`.

    ``begun``: the state of `update` that the single task begins with.
    """
    flat, structure = pytree.tree_flatten(problem.tensors())
    leaves = [tensor.detach().clone().requires_grad_() for tensor in flat]
    start, fixed, rates, of_steps, of_transform, _ = pytree.tree_unflatten(leaves, structure)
    losses, outputs = [], []
    for i in range(len(pytree.tree_leaves(tasks)[0])):
        task = pytree.tree_map(lambda tensor, i=i: tensor[i], tasks)
        at, total, state = start, torch.zeros((), dtype=torch.float64), dict(begun or {})
        for step in range(max(problem.steps, 1)):
            still = fixed | (of_steps[step] if of_steps else {})
            if problem.steps:
                loss, _ = problem.support(at | still, task, step)
                away = sum((at[name] - start[name]).square().sum() for name in at)
                loss = loss + problem.proximal / 2 * away
                second = problem.order == "second"
                gradients = torch.autograd.grad(
                    loss, list(at.values()), create_graph=second, allow_unused=True,
                    materialize_grads=True,
                )  # fmt: skip
                stepped = dict(zip(at, gradients, strict=True))
                if problem.transform is not None:
                    more = (at,) if problem.transform.weights else ()
                    stepped = problem.transform.function(stepped, of_transform, *more)
                stepped = update(problem, at, stepped, state)
                at = {
                    name: tensor - problem.lr * (rates[step][name] if rates else 1) * stepped[name]
                    for name, tensor in at.items()
                }
            loss, last = problem.query(at | still, task, step)
            weights = problem.query_weights
            is_last = step == problem.last_step
            total = total + (float(is_last) if weights is None else weights[step]) * loss
        losses.append(total)
        outputs.append(last.detach())
    total = torch.stack(losses).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    gradients = pytree.tree_unflatten(found, structure)
    return Outer(gradients, torch.stack(losses).detach(), torch.stack(outputs))
