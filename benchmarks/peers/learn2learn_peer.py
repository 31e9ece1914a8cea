"""learn2learn's MAML as its examples use it: clone, adapt, backward, one task after another."""

from torch import Tensor, nn

from benchmarks.network import Backward, Loss
from maml.config import Config


def backward_of(network: nn.Module, config: Config, loss: Loss) -> Backward:
    """Return a function that adds a task's gradients to those of ``network``."""
    import learn2learn  # imported late: it prints notices

    maml = learn2learn.algorithms.MAML(network, lr=config.inner_lr, first_order=False)

    def backward(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> None:
        clone = maml.clone()
        for _ in range(config.inner_steps):
            clone.adapt(loss(clone(support_x), support_y))
        loss(clone(query_x), query_y).backward()

    return backward
