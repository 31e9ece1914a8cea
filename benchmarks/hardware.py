"""What a benchmark ran on: part of every record."""

from __future__ import annotations

import os
import time
from typing import Any

from maml.run.provenance import git_commit, machine, versions


def describe(threads: int) -> dict[str, Any]:
    """Return processor, cores, memory, versions, commit and date."""
    return {
        **machine(),
        "threads": threads,
        "load_before": os.getloadavg()[0],
        "versions": versions(),
        "git_commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
