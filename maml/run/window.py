"""Sums over the iterations since the last row of metrics.jsonl."""

from typing import Any

import torch

from maml.worker import Share

NOTHING: dict[str, Any] = {"totals": None, "count": 0, "skipped": 0, "seconds": 0.0}


class Window:
    """What a row of metrics.jsonl tells of; ``names`` are of the elements of `Share.totals`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names, self._sums = names, dict(NOTHING)

    def add(self, share: Share, seconds: float) -> None:
        """Add a step that was taken."""
        before = self._sums["totals"]
        self._sums["totals"] = share.totals if before is None else before + share.totals
        self._sums["count"] += share.n_tasks
        self._sums["seconds"] += seconds

    def skip(self, seconds: float) -> None:
        """Add a step that was not taken: its numbers would spoil the means."""
        self._sums["skipped"] += 1
        self._sums["seconds"] += seconds

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it: the row that it is part of may come much later."""
        totals = self._sums["totals"]
        return self._sums | {"totals": None if totals is None else totals.cpu()}

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Go on from what `state` returned, on ``home``; empty, as of an earlier version: anew."""
        if state:
            totals = state["totals"]
            self._sums = state | {"totals": None if totals is None else totals.to(home)}

    def close(self, report: dict[str, Any], spent: dict[str, float]) -> dict[str, Any]:
        """Return the row, and begin the next one.

        It has means over tasks by name, if there are any, tasks per second, the strategy's
        ``report``, and the seconds that this process ``spent`` on what.
        """
        totals, count, skipped, seconds = (self._sums[name] for name in NOTHING)
        row: dict[str, Any] = {}
        if totals is not None:
            row |= zip(self._names, (totals / count).tolist(), strict=True)
        row["tasks_per_second"] = count / seconds
        if skipped:
            row["skipped"] = skipped
        # What is left is for messages, and for waiting for others.
        elsewhere = max(0.0, seconds - sum(spent.values()))
        self._sums = dict(NOTHING)
        return row | report | {"time": spent | {"elsewhere": elsewhere}}
