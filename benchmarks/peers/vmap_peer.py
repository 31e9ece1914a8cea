"""torch.func as its tutorial composes it: grad of the sum of vmap of the loss after grad steps."""

import torch
from torch import Tensor, nn

from benchmarks.network import Repetition, loss_function, peer_network
from datasets.tasks import Task
from maml.config import Config
from maml.params import Params


def build(config: Config, tasks: Task, *, compiled: bool) -> Repetition:
    """Return a repetition; ``compiled``: torch.compile compiles it in the first call."""
    network, names = peer_network(config)
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, _PlainNorm(child))
    begun = {name: p.detach() for name, p in network.named_parameters()}
    loss = loss_function(config)

    def set_loss(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        return loss(torch.func.functional_call(network, weights, (x,)), y)

    def outer(weights: Params, task: Task) -> Tensor:
        for _ in range(config.inner_steps):
            gradients = torch.func.grad(set_loss)(weights, task.support_x, task.support_y)
            weights = {k: weights[k] - config.inner_lr * gradients[k] for k in weights}
        return set_loss(weights, task.query_x, task.query_y)

    def total(weights: Params, tasks: Task) -> Tensor:
        return torch.func.vmap(outer, in_dims=(None, 0))(weights, tasks).sum()

    gradient = torch.func.grad(total)
    gradient = torch.compile(gradient) if compiled else gradient

    def repetition() -> Params:
        return {names[name]: g for name, g in gradient(begun, tasks).items()}

    return repetition


class _PlainNorm(nn.Module):
    """``nn.BatchNorm2d`` in plain operations, as functorch's second derivative of it is wrong."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
        scale = self.weight[:, None, None] * torch.rsqrt(variance + self.eps)
        return (x - mean) * scale + self.bias[:, None, None]
