"""TorchOpt's MAML example: MetaSGD with the state extracted and recovered, task by task."""

import torchopt
from torch import Tensor, nn

from benchmarks.network import Backward, Loss
from maml.config import Config


def backward_of(network: nn.Module, config: Config, loss: Loss) -> Backward:
    """Return a function that adds a task's gradients to those of ``network``."""
    inner = torchopt.MetaSGD(network, lr=config.inner_lr)
    network_start = torchopt.extract_state_dict(network, by="reference")
    inner_start = torchopt.extract_state_dict(inner, by="reference")

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        for _ in range(config.inner_steps):
            inner.step(loss(network(support_x), support_y))
        loss(network(query_x), query_y).backward()
        torchopt.recover_state_dict(network, network_start)
        torchopt.recover_state_dict(inner, inner_start)

    return backward
