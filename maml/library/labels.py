"""Targets that are classes: accuracy is measured, and a label that is no class is refused."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from datasets.tasks import Task
from maml.errors import UserError
from maml.execution.trial import Trial
from maml.learners import Learner
from maml.learners.objectives import classes_of, for_targets
from maml.library.fast_module import first_outputs
from maml.metagradient.by_task import unstacked


class Labels:
    """What a meta-learner has found out about its tasks' targets."""

    def __init__(self, loss: Callable[..., Any] | None, *, of_classes: bool = False) -> None:
        """``loss``: the user's; None: a program's. ``of_classes``: it is the default loss."""
        self._loss, self._of_classes = loss, of_classes
        self._told_apart: dict[tuple[int, int], int] = {}
        self._accepted = set[tuple[int, ...]]()

    def measuring(self, learner: Learner, tasks: list[Task], here: list[Task]) -> Learner:
        """Return a learner that measures accuracy if the targets are classes of the outputs.

        ``here``: the tasks, as `with_labels_here` returns them.

        Raises:
            UserError: for targets that the default loss cannot take, or a label that is no class.
        """
        _, own, x, y = next(unstacked(tasks[0]))
        nests = [type(part).__name__ for part in (own, y) if not isinstance(part, Tensor)]
        of_numbers = not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex()
        if self._of_classes and (nests or of_numbers):
            what = f"its targets are a {nests[0]}" if nests else f"query_y is {y.dtype}"
            raise UserError(
                f"task 0: {what}, and the default loss is of classes; give loss="
                "torch.nn.functional.cross_entropy for their shares [E, N], mse_loss or another one"
            )
        classes = 0 if of_numbers else self._classes(learner, x, y)
        for i, both in enumerate(zip(tasks, here, strict=True) if classes else ()):
            sets, seen = (next(unstacked(task)) for task in both)
            for part, at in (("support", 0), ("query", 2)):
                x, y = sets[at : at + 2]
                self._check(learner, f"task {i}: {part}_y", x, y, seen[at + 1])
        parts = y.dim() - 1 if classes else 0
        if self._loss is None or (classes and not parts):
            return learner  # its own metrics fit
        found = copy.copy(learner)
        found.objective = for_targets(
            found.objective, classes, parts, classes_first=self._of_classes
        )
        found.metric_names = found.objective.names
        return found

    def _classes(self, learner: Learner, x: Tensor, y: Tensor) -> int:
        """Return the number of classes in outputs for ``x [E, …]``; 0: ``y`` are not classes."""
        key = y.dim(), len(y)
        if key not in self._told_apart:
            self._told_apart[key] = classes_of(first_outputs(learner, x), y, self._of_classes)
        return self._told_apart[key]

    def _check(self, learner: Learner, what: str, x: Tensor, y: Tensor, seen: Tensor) -> None:
        """Refuse labels ``y`` outside the classes, unless the loss accepts the set, to ignore them.

        ``seen``: the labels on the CPU.
        """
        if not isinstance(y, Tensor):
            return
        classes = self._classes(learner, x, y) if len(y) else 0
        strange = tuple(seen[(seen < 0) | (seen >= classes)].unique().tolist())
        if not strange or strange in self._accepted:
            return
        try:
            outputs = first_outputs(learner, x)
            with Trial(self._loss):
                learner.loss(outputs, y)
        except Exception as error:
            raise UserError(
                f"{what} has the label {strange[-1]}; the module tells {classes} classes apart, "
                f"with labels from 0 to {classes - 1}"
            ) from error
        self._accepted.add(strange)
