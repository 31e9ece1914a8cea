"""Runs that were disturbed at random moments, and whether they ended with the same bits.

The record is made by ``python -m tests.soak --minutes 30 --seed 0 --json FILE``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.markdown import grid


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown: a row for each strategy."""
    rows = []
    for strategy in dict.fromkeys(row["strategy"] for row in record["rows"]):
        of_it = [row for row in record["rows"] if row["strategy"] == strategy]
        faults = Counter(fault for row in of_it for fault in row["faults"])
        rows.append([
            f"`{strategy}`",
            str(len(of_it)),
            ", ".join(f"{n} × {fault}" for fault, n in sorted(faults.items())),
            str(sum(row["starts"] for row in of_it)),
            str(sum(row["equal"] for row in of_it)),
        ])  # fmt: skip
    return grid(["strategy", "runs", "faults", "starts", "with the same bits"], rows)
