"""Sums over the iterations since the last row of metrics.jsonl."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maml.worker import Share


class Window:
    """What a row of metrics.jsonl tells of."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """``names``: of the elements of `Share.totals`."""
        self._names = names
        self.clear()

    def clear(self) -> None:
        """Begin the next row."""
        self._totals: Tensor | None = None
        self._count, self._skipped, self._seconds = 0, 0, 0.0

    def add(self, share: Share, seconds: float) -> None:
        """Add a step that was taken."""
        self._totals = share.totals if self._totals is None else self._totals + share.totals
        self._count += share.n_tasks
        self._seconds += seconds

    def skip(self, seconds: float) -> None:
        """Add a step that was not taken: its numbers would spoil the means."""
        self._skipped += 1
        self._seconds += seconds

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it: the row that it is part of may come much later."""
        totals = None if self._totals is None else self._totals.cpu()
        return {
            "totals": totals, "count": self._count, "skipped": self._skipped,
            "seconds": self._seconds,
        }  # fmt: skip

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Go on from what `state` returned, on ``home``; empty, as of an earlier version: anew."""
        if state:
            self._totals = None if state["totals"] is None else state["totals"].to(home)
            self._count, self._skipped = state["count"], state["skipped"]
            self._seconds = state["seconds"]

    def close(self, report: dict[str, Any], spent: dict[str, float]) -> dict[str, Any]:
        """Return the row, and begin the next one.

        Args:
            report: What the strategy says of these iterations.
            spent: The seconds that this process spent on what.

        Returns:
            Means over tasks by name, if there are any, and tasks per second.
        """
        row: dict[str, Any] = {}
        if self._totals is not None:
            row |= zip(self._names, (self._totals / self._count).tolist(), strict=True)
        row["tasks_per_second"] = self._count / self._seconds
        if self._skipped:
            row["skipped"] = self._skipped
        # What is left is for messages, and for waiting for others.
        elsewhere = max(0.0, self._seconds - sum(spent.values()))
        self.clear()
        return row | report | {"time": spent | {"elsewhere": elsewhere}}
