"""Sinusoids with bad data in one training task: ``--data tests.poisoned:nan``.

The fault is in the data. With every strategy, the process that has the task meets it.
"""

import math

from torch import Tensor

from datasets.sinusoid import Sinusoid
from datasets.tasks import Task

BAD = 7


class Poisoned(Sinusoid):
    """A target of task `BAD` is NaN."""

    def tasks(self, ids: Tensor) -> Task:
        tasks = super().tasks(ids)
        if self.split == "train":
            self.spoil(tasks, ids == BAD)
        return tasks

    def spoil(self, tasks: Task, bad: Tensor) -> None:
        tasks.query_y[bad, 0] = math.nan


class Huge(Poisoned):
    """A point of the task is so far away that only the square of its gradient is not finite."""

    def spoil(self, tasks: Task, bad: Tensor) -> None:
        tasks.query_x[bad, 0] = 1e12


nan, huge = Poisoned, Huge
