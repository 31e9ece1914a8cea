"""Model-Agnostic Meta-Learning (Finn et al. 2017, arXiv:1703.03400), second and first order."""

from __future__ import annotations

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.config import Config
from maml.kernels import native_set_loss
from maml.learners.base import Learner, OuterGradient
from maml.metagradient import forward_over_reverse
from maml.metagradient.derivatives import FunctionLoss, SetLoss
from maml.metagradient.inner import OPTIMIZERS, Params, adapt
from maml.metagradient.rules import make_rule

COMPONENTS = {
    "maml": {
        "attribute": "MAML",
        "help": "initial weights from which a few inner steps suit a task",
        "reads": (
            "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "order", "shots",
            "queries", "eval_queries",
        ),
    }
}  # fmt: skip

REMEMBERED_STEPS = 8
"""Up to here forward over reverse keeps each step's activations; beyond, it saves the memory."""


class MAML(Learner):
    """Initial weights from which a few inner steps on the support set suit the query set."""

    learned_rates = False
    """Whether `inner_rates` are meta-parameters, of `rates_gradients`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.order = config.order
        self.inner_lr = config.inner_lr

    def inner_rates(self, meta_params: Params, steps: int) -> list[Params] | None:
        """Return what each step's updates are multiplied by, as `inner.adapt` takes it."""
        return None

    def rates_gradients(self, rates: list[Params]) -> Params:
        """Return the gradients of the meta-parameters that `inner_rates` are made of.

        ``rates``: Σ over tasks of the gradient of each step's rates.
        """
        return {}

    def support_loss(self, weights: Params, start: Params, task: Task) -> Tensor:
        """Return what the inner loop of one task descends, at ``weights``, begun at ``start``.

        A learner that has another has an `outer_gradient` of its own: the one here, where it is not
        by reverse mode, knows the loss of a set alone.
        """
        return self.set_loss(weights, task.support_x, task.support_y)[0]

    def adapted(self, meta_params: Params, task: Task, steps: int, order: str = "first") -> Params:
        """Return the network's weights after ``steps`` inner steps on one task's support set."""
        start = self.network_weights(meta_params)
        return adapt(
            lambda weights: self.support_loss(weights, start, task),
            start,
            optimizer=OPTIMIZERS[self.config.inner_optimizer](self.inner_lr),
            steps=steps,
            order=order,
            rates=self.inner_rates(meta_params, steps),
        )

    def outer_loss(self, meta_params: Params, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        """Query loss after the last inner step (algorithm 2, line 10)."""
        adapted = self.adapted(meta_params, task, self.config.inner_steps, self.order)
        loss, outputs = self.set_loss(adapted, task.query_x, task.query_y)
        return loss, self.objective.metrics(outputs.detach(), task.query_y)

    def outer_gradient(self, meta_params: Params, tasks: Task) -> OuterGradient:
        """Differentiate in reverse, or forward over reverse (``--meta-gradient mixed``)."""
        native = self._native_loss(tasks.support_x.device)
        if native is None and self.config.meta_gradient != "mixed":
            return super().outer_gradient(meta_params, tasks)
        steps = self.config.inner_steps
        outer = forward_over_reverse.meta_gradient(
            native or FunctionLoss(self.set_loss),
            self.network_weights(meta_params),
            tasks,
            rule=make_rule(
                self.config.inner_optimizer, self.inner_lr, learned_rates=self.learned_rates
            ),
            steps=steps,
            order=self.order,
            remember=steps <= REMEMBERED_STEPS,
            rates=self.inner_rates(meta_params, steps),
        )
        return self.named(outer, tasks)

    def named(self, outer: forward_over_reverse.Outer, tasks: Task) -> OuterGradient:
        """Return gradients by the names of the meta-parameters, and metrics."""
        metrics = self.objective.metrics(outer.outputs, tasks.query_y)
        gradients = {f"network.{name}": tensor for name, tensor in outer.gradients.items()}
        gradients |= self.rates_gradients(outer.rates)
        return OuterGradient(gradients, outer.losses, metrics)

    def prepare(self, device: torch.device) -> None:
        """Compile the kernels, if they are to serve."""
        self._native_loss(device)

    def in_torch(self, device: torch.device) -> bool:
        """See `Learner.in_torch`: not where the kernels serve."""
        return self._native_loss(device) is None

    def _native_loss(self, device: torch.device) -> SetLoss | None:
        if self.config.meta_gradient == "reverse":
            return None
        return native_set_loss(self.config, self.network, device.type)
