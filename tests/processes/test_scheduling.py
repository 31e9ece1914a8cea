"""A run's threads do not displace each other; a policy that the user has chosen is kept."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.launching import TRAIN, start
from tests.runs import as_flags, glyphs

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux's sched(7)")


def policies(pid: int) -> list[int]:
    """The policies of all threads of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getscheduler(int(task.name)))
    return found


def test_policy(tmp_path: Path) -> None:
    """Every thread of a run has it: the transport's and those that make the next tasks, too."""
    config = glyphs(iterations=10**6, run_dir=str(tmp_path), strategy="allreduce", log_every=1)
    launched = start([*TRAIN, *as_flags(config)])
    launched.wait_for("iterations 0 to", timeout=60)
    found = policies(launched.process.pid)
    launched.process.send_signal(signal.SIGTERM)
    launched.wait(60, expect=143)
    assert len(found) > 3
    assert set(found) == {os.SCHED_BATCH}
