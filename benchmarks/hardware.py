"""What a benchmark ran on: part of every record."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from maml.run.provenance import git_commit, versions


def describe(threads: int) -> dict[str, Any]:
    """Return processor, cores, memory, versions, commit and date."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].split(":")[1].strip() if names else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_before": os.getloadavg()[0],
        "versions": versions(),
        "git_commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
