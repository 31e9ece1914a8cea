"""A plain loop of torch with ``create_graph``, one task after another."""

import torch
from torch import Tensor, nn

from benchmarks.network import Backward, Loss
from maml.config import Config


def backward_of(network: nn.Module, config: Config, loss: Loss) -> Backward:
    """Return a function that adds a task's gradients to those of ``network``."""
    start = dict(network.named_parameters())

    def loss_of(at: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.func.functional_call(network, at, (x,)), y)

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        at: dict[str, Tensor] = {**start}
        for _ in range(config.inner_steps):
            of_support = loss_of(at, support_x, support_y)
            by = torch.autograd.grad(of_support, list(at.values()), create_graph=True)
            moved = (w - config.inner_lr * g for w, g in zip(at.values(), by, strict=True))
            at = dict(zip(at, moved, strict=True))
        loss_of(at, query_x, query_y).backward()

    return backward
