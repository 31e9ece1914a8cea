"""What every fault does to every strategy: the table of docs/faults.md.

The record is made by ``python -m tests.strategies.faults --json FILE``, which injects them.
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.markdown import grid


def table(record: dict[str, Any]) -> str:
    """Return a row for each strategy, fault and rank: seconds to the end, and the line."""
    header = ("strategy", "fault", "of rank", "ended after", "status", "what the run says")
    rows = [
        (
            f"`{row['strategy']}`",
            row["fault"],
            "launcher" if row["rank"] < 0 else str(row["rank"]),
            ", ".join(f"{seconds:.0f} s" for seconds in row["seconds"]),
            row["state"],
            "; ".join(f"`{_anonymous(line)}`" for line in row["said"]) or "–",
        )
        for row in record["rows"]
    ]
    return f"`--timeout {record['timeout']:g}`, three processes of one host\n\n" + grid(
        header, rows
    )


def _anonymous(line: str) -> str:
    """Return the line without what is different each time."""
    line = line[max(line.find("error: "), 0) :].replace("|", "/")
    return re.sub(r"pid \d+", "pid …", re.sub(r"host \S+,", "host …,", line))
