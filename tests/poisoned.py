"""Sinusoids of which one training task cannot be learned from: ``--data tests.poisoned:nan``.

A fault in data, not in a process: it meets whichever process has the task, with every strategy.
"""

import math

import torch
from torch import Tensor

from datasets.sinusoid import Sinusoid
from datasets.tasks import Task

BAD = 7


class Poisoned(Sinusoid):
    """A target of task `BAD` is no number."""

    def tasks(self, ids: Tensor) -> Task:
        tasks = super().tasks(ids)
        if self.split == "train":
            self.spoil(tasks, ids == BAD)
        return tasks

    def spoil(self, tasks: Task, bad: Tensor) -> None:
        tasks.query_y[bad, 0] = math.nan


class Huge(Poisoned):
    """A point of it is so far away that its loss is finite, its gradient, too, but no square."""

    def spoil(self, tasks: Task, bad: Tensor) -> None:
        tasks.query_x[bad, 0] = 1e12


def nan(split: str, shots: int, queries: int, seed: int, dtype: torch.dtype) -> Poisoned:
    return Poisoned(split=split, shots=shots, queries=queries, seed=seed, dtype=dtype)


def huge(split: str, shots: int, queries: int, seed: int, dtype: torch.dtype) -> Huge:
    return Huge(split=split, shots=shots, queries=queries, seed=seed, dtype=dtype)
