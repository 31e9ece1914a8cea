"""Networks, losses and tasks for tests of the library, and a plain loop as their oracle."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maml

scale = 1.0
"""A number that a test changes."""
Tasks = list[tuple[Tensor, Tensor, Tensor, Tensor]]


def dense(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *more, nn.Tanh(), nn.Linear(8, 3)).double()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one if x[0, 0, 0] > 0 else self.other)(x.flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.flatten(1))))[:, :3]


class TwoOutputs(nn.Module):
    context_layer = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.size = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = torch.tanh(self.body(x.flatten(1)))
        return {"classes": self.classes(features), "more": (self.size(features), len(x))}


class Judge(nn.CrossEntropyLoss):
    """A loss with a frozen network and a buffer of another type than the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3).double().requires_grad_(False)
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        assert self.share.dtype == torch.float32
        return super().forward(self.body(outputs), y) * self.share


class Tempered(nn.CrossEntropyLoss):
    """A loss with parameters that learn, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.heat, self.body = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.body(outputs) * self.heat, y) * self.frozen.mean()


class Waves(nn.Module):
    """Complex and real parameters, under functions that are not holomorphic."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(16, 4, dtype=torch.complex128))
        self.mixed = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        waves = x.flatten(1).to(self.turns.dtype) @ self.turns
        waves = (waves * (1 + waves.abs()).log() + 0.1 * waves.conj() ** 2) @ self.mixed
        return waves.abs() + 0.3 * waves.imag + self.bias


def of_both(outputs: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs["classes"], y) + outputs["more"][0].square().mean()


def of_words(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


def made(sizes: tuple[int, ...] = (6, 6, 6)) -> Tasks:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            *(torch.randn(n, 4, 4, generator=generator).double(), torch.arange(n) % 3),
            *(torch.randn(5, 4, 4, generator=generator).double(), torch.arange(5) % 3),
        )
        for n in sizes
    ]


def stacked(tasks: Tasks) -> Any:
    return tuple(torch.stack(parts) for parts in zip(*tasks, strict=True))


def by_loop(
    network: nn.Module, tasks: Tasks, steps: int, lr: Any, loss_of: Any = F.cross_entropy,
    inner: Any = None, more: Sequence[Tensor] = (), order: int = 2,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return the outer loss, and its gradient by all that learns in the network and the loss.

    ``lr``: a number, or a function of a parameter's name and the step. ``inner``: another loss of
    the support set. ``more``: what else learns.
    """
    params = {name: p for name, p in network.named_parameters() if p.requires_grad}
    total = torch.zeros((), dtype=torch.float64)

    def answers(at: dict[str, Tensor], x: Any) -> Any:
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        given = ((), x) if isinstance(x, dict) else (x,)
        return torch.func.functional_call(network, {**at, **buffers}, *given)

    for support_x, support_y, query_x, query_y in tasks:
        at = params
        for step in range(steps):
            loss = (inner or loss_of)(answers(at, support_x), support_y)
            by = torch.autograd.grad(
                loss, list(at.values()), create_graph=order == 2,
                materialize_grads=True, allow_unused=True,
            )  # fmt: skip
            rates = {name: lr(name, step) if callable(lr) else lr for name in at}
            at = {n: p - rates[n] * g for (n, p), g in zip(at.items(), by, strict=True)}
        total = total + loss_of(answers(at, query_x), query_y) / len(tasks)
    learned = [*params.values(), *learning(loss_of), *more]
    return total.detach(), list(torch.autograd.grad(total, learned))


def learning(loss: Any) -> list[Tensor]:
    return [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []


def found_with(network: nn.Module, steps: int) -> list[Tensor]:
    """Return what training, a user's own outer loss and an evaluation compute."""
    network.zero_grad()
    x = torch.randn(2, 6, 1, 12, 12, generator=torch.Generator().manual_seed(0)).double()
    task = x[0], torch.arange(6) % 3, x[1], torch.arange(6) % 3
    learner = maml.MAML(network, inner_lr=0.3, inner_steps=steps)
    learner([task, task]).backward()
    params = [*network.parameters()]
    found: list[Any] = [parameter.grad for parameter in params]
    fast = learner.adapt(*task[:2], steps=steps)
    answers = fast(task[2]), fast(task[2], "support")
    assert not torch.equal(*answers)
    for of_either in answers:
        loss = F.cross_entropy(of_either, task[3])
        found += [of_either, *torch.autograd.grad(loss, params, retain_graph=True)]
    return found + [*learner.evaluate([task]).values()]


class Blockwise(nn.Module):
    """An output layer after a block that the backward pass may compute ``again``."""

    def __init__(self, size: int, *block: nn.Module, again: bool) -> None:
        super().__init__()
        self.block, self.head, self.again = nn.Sequential(*block), nn.Linear(size, 3), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return self.head(checkpoint(self.block, x, use_reentrant=False))
        return self.head(self.block(x))
