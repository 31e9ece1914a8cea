"""What a meta-learner says of its results: which numbers an evaluation has, and which are none."""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

APART = "non_transductive_"


def columns(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the results that all tasks have, and those by the support set where they differ."""
    few = [i for i, row in enumerate(rows) if "loss" not in row]
    if few:
        warnings.warn(
            f"task {few[0]}: one query has no statistics by which a batch norm would normalise it: "
            f"all results are {APART}…, by the statistics of the support set",
            stacklevel=5,
        )

    def differs(name: str) -> bool:
        return any(row[name] is not row.get(name.removeprefix(APART)) for row in rows)

    names = [name for name in rows[0] if all(name in row for row in rows)]
    names = [name for name in names if not name.startswith(APART) or differs(name)]
    return {name: torch.cat([row[name] for row in rows]) for name in names}


class NoNumbers:
    """Warns once of tasks whose losses are not finite."""

    def __init__(self) -> None:
        self._warned = False
        self._copied = deque[tuple[torch.Event, Tensor, Sequence[int]]]()

    def __reduce__(self) -> Any:
        return type(self), ()

    def look(self, losses: Tensor, places: Sequence[int]) -> None:
        """Look at losses ``[B]``, by tasks' ``places``. Those of a device are looked at in a later
        call, when they are known, so that nothing waits for the device.
        """
        if self._warned:
            return
        if losses.is_cpu:
            self._warn(losses.isfinite(), places)
            return
        while self._copied and self._copied[0][0].query():
            self._warn(*self._copied.popleft()[1:])
        event, finite = torch.Event(losses.device), losses.isfinite().to("cpu", non_blocking=True)
        event.record(torch.accelerator.current_stream(losses.device))
        self._copied.append((event, finite, places))

    def _warn(self, finite: Tensor, places: Sequence[int]) -> None:
        wrong = [i for i, fine in zip(places, finite.tolist(), strict=True) if not fine]
        if not wrong:
            return
        self._warned = True
        some = ", ".join(map(str, wrong[:8])) + ", …" * (len(wrong) > 8)
        warnings.warn(
            f"the outer loss is not finite in tasks {some}: look there for nan in the inputs, or "
            "take a smaller inner_lr; there is no further warning",
            stacklevel=3,
        )
