"""Tasks of learn2learn: a ``Taskset`` (called ``TaskDataset`` before) as addressable episodes.

learn2learn draws a task from the global generators, which :mod:`datasets.checked` seeds. This
module bypasses learn2learn's memory of drawn tasks, because it depends on the order of the draws.
Nothing here imports learn2learn: code that returns a Taskset has already imported it.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.episodes import Episodes
from datasets.errors import DataError
from datasets.tasks import Task


def is_taskset(value: object) -> bool:
    """Return whether this is a Taskset of learn2learn, of any of its classes."""
    module = sys.modules.get("learn2learn.data.task_dataset")
    return module is not None and isinstance(value, module.CythonTaskDataset)


class Tasksets(Episodes):
    """The tasks of a Taskset for classification, each of ``ways`` classes.

    In each class, in learn2learn's order, the first ``shots`` examples are support and the next
    ``queries`` are query. Labels become 0 to N - 1, in the order of learn2learn's labels. A Taskset
    with a ``num_tasks`` has that many tasks, and then repeats them.
    """

    def __init__(
        self, taskset: Any, name: str, split: str, *, ways: int, shots: int, queries: int
    ) -> None:
        self.taskset, self.name, self.split = taskset, name, split
        self.ways, self.shots, self.queries = ways, shots, queries
        self.one_pass = taskset.num_tasks if taskset.num_tasks > 0 else None

    def tasks(self, ids: Tensor) -> Task:
        """Draw a task for each of ``ids`` (int64 ``[B]``), class by class, or `DataError`."""
        tasks = [self._task() for _ in ids]
        return Task(*map(torch.stack, zip(*tasks, strict=True)))

    def _task(self) -> Task:
        x, y = self.taskset.get_task(self.taskset.sample_task_description())
        classes, labels, counts = np.unique(np.asarray(y), return_inverse=True, return_counts=True)
        what = f"the {self.split} tasks of {self.name}"
        if classes.dtype.kind not in "iu":
            raise DataError(f"--data {self.name}: labels of {what} are {classes.dtype}, no classes")
        if len(classes) != self.ways:
            have = f"{what} have {len(classes)} classes; give --ways {len(classes)}"
            raise DataError(f"--ways {self.ways}: {have}")
        needed = self.shots + self.queries
        if counts.min() < needed:
            raise DataError(
                f"--shots {self.shots} and --queries {self.queries}: they need {needed} examples "
                f"of a class, and one of {what} has {counts.min()}"
            )
        rows = np.stack([np.flatnonzero(labels == way)[:needed] for way in range(self.ways)])
        support, query = rows[:, : self.shots].ravel(), rows[:, self.shots :].ravel()
        y = torch.from_numpy(labels)
        return Task(x[support], y[support], x[query], y[query])
