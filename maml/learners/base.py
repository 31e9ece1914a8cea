"""The learner: a module of meta-parameters that states one task's inner problem and outer loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.errors import UserError
from maml.learners.stated import Stated
from maml.metagradient import differentiate, unrolled
from maml.metagradient.by_task import each_task
from maml.metagradient.problem import Problem
from maml.networks import serving
from maml.params import Params


class Predictions(NamedTuple):
    """What a network answers to the queries of B tasks: ``[B, E, …]`` each.

    Attributes:
        transductive: Queries are normalised by the statistics of the whole query set, as in MAML's
            released code.
        non_transductive: By those of the same network on the support set, so that a query's answer
            depends on no other query. The same tensor where the network normalises nothing.
    """

    transductive: Tensor
    non_transductive: Tensor


class Adapted(NamedTuple):
    """What the inner loop has made of B tasks.

    Attributes:
        problem: The inner problem.
        at: What has adapted, ``{name: [B, …]}``.
    """

    problem: Problem
    at: Params


class Learner(Stated):
    """What learns: its parameters are the meta-parameters, by name.

    The network's weights are named ``network.…``; a subclass adds what else it learns. The
    methods take meta-parameters as an argument and read none of their own, so one learner serves
    any number of workers and steps. What a subclass writes is in `Stated`; here is what is made
    of it, for B tasks.
    """

    def meta_parameters(self) -> Params:
        """Return the learner's own meta-parameters by name (aliases, not copies)."""
        # Not `named_parameters`: in a by-reference clone they are plain tensors.
        return {
            f"{prefix}.{name}" if prefix else name: tensor
            for prefix, module in self.named_modules()
            for name, tensor in module._parameters.items()
            if tensor is not None
        }

    def outer_gradient(
        self,
        meta_params: Params,
        tasks: Task,
        phase: int = 0,
        *,
        checked: bool = False,
    ) -> differentiate.OuterGradient:
        """Differentiate the outer loss summed over B tasks, of one phase, by the meta-parameters.

        ``checked``: see `differentiate.meta_gradient`.

        Raises:
            RuntimeError: for a meta-parameter that no loss depends on: a mistake, not a zero.
        """
        found = differentiate.meta_gradient(
            lambda params: self.training_problem(params, phase),
            meta_params,
            tasks,
            self.config.meta_gradient,
            self.batching,
            checked=checked,
        )
        return found._replace(metrics=self._measured(found.outputs, tasks.query_y))

    def adapted(self, meta_params: Params, task: Task, steps: int) -> Params:
        """Return all parameters after ``steps`` inner steps on one task, by their own names."""
        problem = self.problem(meta_params, steps)
        return problem.params(unrolled.adapt(problem, task), problem.last_step)

    @torch.no_grad()
    def adapt(self, meta_params: Params, tasks: Task, steps: int) -> Adapted:
        """Adapt to each of B tasks; the learners here read the support sets alone."""
        problem = self.problem(meta_params, steps)
        return Adapted(problem, differentiate.adapt(problem, tasks, self.batching))

    @torch.no_grad()
    def predict(self, adapted: Adapted, tasks: Task) -> Predictions:
        """Answer the queries of the B tasks that ``adapted`` has adapted to."""
        problem, at = adapted

        def answer(at: Params, task: Task) -> tuple[Tensor, Tensor]:
            return self.answers(problem.params(at, problem.last_step), task)

        return Predictions(*each_task(answer, self.batching)(at, tasks))

    def predictions(self, meta_params: Params, tasks: Task, steps: int) -> Predictions:
        """Adapt to each of B tasks, and answer its queries."""
        return self.predict(self.adapt(meta_params, tasks, steps), tasks)

    @torch.no_grad()
    def scores(self, predictions: Predictions, y: Tensor) -> dict[str, Tensor]:
        """Return each task's loss and metrics, ``{name: [B]}``, of its queries' targets ``y``.

        The loss is the objective's, or the author's own `loss`, whatever else the learner was
        trained with: so that learners can be compared.

        Keys: ``loss`` and the metrics' names, and each again as ``non_transductive_<name>``.
        """
        loss = self.objective.loss if self._is_own("loss") else self.loss
        results = {}
        for prefix, outputs in zip(("", "non_transductive_"), predictions, strict=True):
            results[f"{prefix}loss"] = each_task(loss, self.batching)(outputs, y)
            for name, value in self._measured(outputs, y).items():
                results[f"{prefix}{name}"] = value
        return results

    def evaluate(self, meta_params: Params, tasks: Task) -> dict[str, Tensor]:
        """Return the `scores` of B tasks after ``--eval-inner-steps`` inner steps."""
        steps = self.config.eval_inner_steps
        return self.scores(self.predictions(meta_params, tasks, steps), tasks.query_y)

    def _measured(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.metrics(outputs, y)
        if set(found) != set(self.metric_names):
            raise UserError(
                f"--learner {self.config.learner}: metrics returns {', '.join(found) or 'nothing'}"
                f" and metric_names is {', '.join(self.metric_names) or 'empty'}: name the same"
            )
        return found

    def prepare(self, device: torch.device) -> None:
        """Hold the buffers there, and compile the kernels if they serve; refuse what cannot work.

        Raises:
            UserError: naming the flag.
        """
        self.hold_buffers(device)
        try:
            self.training_problem(self.meta_parameters(), self.last_phase)
        except ValueError as error:
            # What a learner of a user's own states does not go together.
            raise UserError(f"--learner {self.config.learner}: {error}") from error
        reason = self.obstacle(device)
        if self.config.kernels == "native" and reason is not None:
            raise UserError(f"--kernels native: {reason}")

    def hold_buffers(self, device: torch.device) -> None:
        """Move the buffers to ``device``; parameters stay: the methods take those as arguments."""
        for module in self.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def obstacle(self, device: torch.device) -> str | None:
        """Say why compiled kernels do not serve this learner on ``device``; None: they do."""
        if device.type != "cpu":
            return f"the compiled kernels run on the CPU, not on --device {device.type}"
        return serving.obstacle(self.network)

    def in_torch(self, device: torch.device) -> bool:
        """Say whether `outer_gradient` is made of torch's operations alone.

        Such a function can be compiled (``--compile``).
        """
        return self.obstacle(device) is not None
