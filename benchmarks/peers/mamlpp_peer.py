"""MAML++ as one would write it with torch.func: grad of the sum of vmap of its outer loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import Repetition
from datasets.tasks import Task
from maml.learners import Learner
from maml.learners.mamlpp import weights_of
from maml.params import Params


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition."""
    config = learner.config
    params = {name: p.detach() for name, p in learner.meta_parameters().items()}
    moving = [name for name in params if name.startswith("network.")]

    def logits(params: Params, weights: Params, step: int, x: Tensor) -> Tensor:
        for i in range(4):
            block = f"network.blocks.{i}."
            x = F.conv2d(x, weights[block + "conv.weight"], weights[block + "conv.bias"], padding=1)
            variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
            norm = f"norms.blocks.{i}.norm."
            scale = params[norm + "weight"][step][:, None, None]
            shift = params[norm + "bias"][step][:, None, None]
            x = (x - mean) * torch.rsqrt(variance + config.norm_eps) * scale + shift
            x = F.max_pool2d(F.leaky_relu(x, config.leak), 2)
        return F.linear(x.flatten(1), weights["network.head.weight"], weights["network.head.bias"])

    def outer(params: Params, task: Task) -> Tensor:
        steps = config.inner_steps
        of_steps = [0.0] * (steps - 1) + [1.0]
        if config.msl_epochs:
            of_steps = weights_of(0, steps, config.msl_epochs)
        weights = {name: params[name] for name in moving}
        total = torch.zeros((), dtype=task.query_x.dtype)
        for step in range(steps):

            def support(weights: Params, step: int = step) -> Tensor:
                return F.cross_entropy(
                    logits(params, weights, step, task.support_x), task.support_y
                )

            gradients = torch.func.grad(support)(weights)
            weights = {
                name: weights[name] - params[name.replace("network", "rates", 1)][step] * gradient
                for name, gradient in gradients.items()
            }
            if of_steps[step]:
                query = logits(params, weights, step, task.query_x)
                total = total + of_steps[step] * F.cross_entropy(query, task.query_y)
        return total

    def total_loss(params: Params) -> Tensor:
        return torch.func.vmap(outer, in_dims=(None, 0))(params, tasks).sum()

    gradient = torch.func.grad(total_loss)

    def repetition() -> Params:
        return gradient(params)

    return repetition
