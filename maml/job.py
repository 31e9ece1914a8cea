"""The job that a process belongs to: what a launcher or scheduler starts again under one name."""

from __future__ import annotations

import os

STARTERS = (
    ("slurm", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""Who starts jobs again, and where it says the name and how often; the outermost first."""


def this_job() -> str | None:
    """Return the job's name, the same at each of its starts; None outside of any."""
    for starter, name, _ in STARTERS:
        # "none" is what torchrun calls all jobs that were given no name.
        if os.environ.get(name, "none") != "none":
            return f"{starter} {os.environ[name]}"
    return None


def started_again() -> bool:
    """Whether this is surely not the job's first start; a host that came back is not counted."""
    return any(os.environ.get(count, "0") not in ("", "0") for *_, count in STARTERS)
