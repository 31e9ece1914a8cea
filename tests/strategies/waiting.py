"""Wait for what a run leaves in its directory, within a limit."""

import time
from pathlib import Path

import psutil

from tests.launching import SLACK, Launched
from tests.runs import metrics


def wait_for_iteration(launched: Launched, run_dir: Path, iteration: int, limit: float) -> None:
    """Wait until a row of at least ``iteration`` is in metrics.jsonl, for ``limit`` × `SLACK` s."""
    deadline = time.monotonic() + SLACK * limit
    while not _has_row(run_dir, iteration):
        assert launched.process.poll() is None, f"ended early: {launched.stderr}"
        assert time.monotonic() < deadline, f"no row of iteration {iteration} in time"
        time.sleep(0.02)


def _has_row(run_dir: Path, iteration: int) -> bool:
    if not (run_dir / "metrics.jsonl").exists():
        return False
    return any(row["iteration"] >= iteration for row in metrics(run_dir))


def process_of_rank(launched: Launched, rank: int) -> int:
    """Return the process id of a rank under torchrun."""
    for process in psutil.Process(launched.process.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            return process.pid
    raise AssertionError(f"rank {rank} not found")
