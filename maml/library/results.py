"""What a meta-learner says of its results: which numbers an evaluation has, and which are none."""

import warnings
from collections.abc import Sequence

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


def warn_of_no_numbers(losses: Tensor, places: Sequence[int]) -> bool:
    """Warn of losses ``[B]`` that are not finite, by tasks' ``places``; return whether any is."""
    wrong = [i for i, loss in zip(places, losses.isfinite().tolist(), strict=True) if not loss]
    if wrong:
        some = ", ".join(map(str, wrong[:8])) + ", …" * (len(wrong) > 8)
        warnings.warn(
            f"the outer loss is not finite in tasks {some}: look there for nan in the inputs, or "
            "take a smaller inner_lr; there is no further warning",
            stacklevel=2,
        )
    return bool(wrong)
