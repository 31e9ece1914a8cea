"""higher's MAML example: a functional model and a differentiable SGD, one task after another."""

import higher
import torch
from torch import Tensor, nn

from benchmarks.network import Backward, Loss
from maml.config import Config


def backward_of(network: nn.Module, config: Config, loss: Loss) -> Backward:
    """Return a function that adds a task's gradients to those of ``network``."""
    optimizer = torch.optim.SGD(network.parameters(), lr=config.inner_lr)

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        context = higher.innerloop_ctx(network, optimizer, copy_initial_weights=False)
        with context as (functional, inner):
            for _ in range(config.inner_steps):
                inner.step(loss(functional(support_x), support_y))
            loss(functional(query_x), query_y).backward()

    return backward
