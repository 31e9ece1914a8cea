"""The job that a process belongs to: what a launcher or a scheduler starts again by itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from maml.processes.identity import started


def this_job() -> dict[str, str]:
    """Return by what names this start may be known again, by who would start it again.

    torchrun: its own process, which lives on while its workers are started again, and when it was
    started: in a container it is process 1 each time. Not the name of its rendezvous, which users
    type, the same one for many jobs. slurm: the job's id, which a requeued job keeps.
    """
    names = {}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_id, parent = os.environ["TORCHELASTIC_RUN_ID"], os.getppid()
        launcher = f"process {parent} of {platform.node()}, started at {started(parent)}"
        names["torchrun"] = f"{run_id} by {launcher}"
    if "SLURM_JOB_ID" in os.environ:
        names["slurm"] = os.environ["SLURM_JOB_ID"]
    return names


def continues(begun: Mapping[str, object]) -> bool:
    """Whether this start is another of the job that was ``begun`` under these names.

    Within one Slurm job a user may give a command twice and mean two runs: its id counts only once
    the job was requeued.
    """
    now = this_job()
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    by = ("torchrun", "slurm") if requeued else ("torchrun",)
    return any(name in now and begun.get(name) == now[name] for name in by)
