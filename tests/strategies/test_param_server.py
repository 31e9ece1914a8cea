"""The param-server strategy as a user runs it, with workers that are slow, frozen or dead."""

import json
import os
import re
import signal
from itertools import zip_longest
from pathlib import Path

import pytest

from maml.config.cli import parse
from maml.errors import UserError
from tests.launching import run, start_ranks, torchrun
from tests.runs import metrics, result
from tests.strategies.faults import planted, wait_for_iteration

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--eval-every", "0", "--eval-tasks", "8"),
    *("--test-tasks", "8", "--log-every", "5", "--compile", "off", "--strategy", "param-server"),
    # At the preset's rate, so few iterations lower the loss by less than it varies by task.
    *("--meta-lr", "0.01"),
]  # fmt: skip


LONG = 120
"""Enough iterations to see that a run learns."""


def test_modes_train(tmp_path: Path) -> None:
    """Every mode with two trainers, trained in one launch."""
    args = [*SINUSOID, "--iterations", str(LONG)]
    configurations = {mode: [*args, "--ps-mode", mode] for mode in ("sync", "async", "backup")}
    # Each trainer calls the server's model while the other's gradient steps it.
    configurations["async remote"] = [*configurations["async"], "--ps-forward", "remote"]
    script = ["-m", "tests.strategies.topologies", str(tmp_path), json.dumps(configurations)]
    run(torchrun(3, script), timeout=150)
    for name in configurations:
        rows = [row for row in metrics(tmp_path / name) if "split" not in row]
        assert [row["iteration"] for row in rows] == list(range(5, LONG + 1, 5))
        assert all(row["wire_bytes"] > 0 and row["server_seconds"] > 0 for row in rows)
        # It learns; the first rows are those of a network that knows nothing.
        assert sum(row["loss"] for row in rows[-10:]) < sum(row["loss"] for row in rows[:10])
        assert result(tmp_path / name)["tasks"] == 8
        assert ("dropped" in rows[0]) == (name != "sync")
        assert ("staleness" in rows[0]) == name.startswith("async")
        if name.startswith("async"):
            # Two trainers: while one computes, the other's updates make it stale.
            staleness = [row["staleness"] for row in rows]
            by_age = [sum(ages) for ages in zip_longest(*staleness, fillvalue=0)]
            assert sum(by_age) == LONG
            assert 0 < by_age[0] < LONG


def test_backup_outlives_workers(tmp_path: Path) -> None:
    """One is frozen, one is killed: training goes on to its end, test included."""
    args = [*SINUSOID, "--iterations", "800", "--ps-mode", "backup", "--ps-backup-workers", "2"]
    # Longer than training takes on a busy machine: the frozen rank is to be found at the end.
    args += ["--timeout", "1000"]
    ranks = start_ranks(4, [*args, "--run-dir", str(tmp_path)])
    try:
        for iteration, rank, number in ((20, 2, signal.SIGSTOP), (200, 3, signal.SIGKILL)):
            wait_for_iteration(ranks[0], tmp_path, iteration, limit=90)
            os.kill(ranks[rank].process.pid, number)
        before = metrics(tmp_path)[-1]["iteration"]
    finally:
        done = [launched.wait(120, expect=None) for launched in ranks]
    assert [rank.returncode for rank in done] == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    assert 200 <= before < 800
    assert re.search(r"rank 2 \(.*\) is stopped by .*; all work is done", done[0].stderr)
    assert metrics(tmp_path)[-1]["iteration"] == 800
    assert result(tmp_path)["tasks"] == 8


PLANTED = """
from maml.run import checkpoint
from maml.processes import liveness
from maml.worker import Worker
meta_gradient, save_in, calls = Worker.share, checkpoint.save_in, 0
def share(*args):
    global calls
    calls += 1
    fault()
    return meta_gradient(*args)
def save(*args, **kwargs):
    delay()
    return save_in(*args, **kwargs)
def fault(): pass
def delay(): pass
Worker.share, checkpoint.save_in = share, save
"""


def test_a_slow_trainer_is_waited_for_at_the_end(tmp_path: Path) -> None:
    """The trainer still computes a gradient when all is done, and then answers."""
    fault = "liveness.GOODBYE = 0.5\ndef fault(): time.sleep(6 * (os.environ['RANK'] == '2'))"
    flags = ["--ps-mode", "async", "--iterations", "20", "--run-dir", str(tmp_path / "run")]
    ranks = start_ranks(3, [*SINUSOID, *flags], script=planted(tmp_path, PLANTED + fault))
    done = [launched.wait(90) for launched in ranks]
    assert "did not leave" not in done[0].stderr
    assert result(tmp_path / "run")["tasks"] == 8


def test_more_failures_than_backups_end_the_run(tmp_path: Path) -> None:
    """The run ends at once, and each trainer shows where it failed."""
    fault = "def fault():\n    if calls > 3 + int(os.environ['RANK']): raise ValueError('planted')"
    flags = ["--ps-mode", "backup", "--iterations", "1000", "--timeout", "1000"]
    args = [*SINUSOID, *flags, "--run-dir", str(tmp_path / "run")]
    ranks = start_ranks(3, args, script=planted(tmp_path, PLANTED + fault))
    done = [launched.wait(90, expect=1) for launched in ranks]
    outlived = re.findall(r"rank (\d) .*failed: .*planted.*; training goes on", done[0].stderr)
    final = re.findall(r"error: rank (\d) .*failed: .*planted", done[0].stderr)
    assert sorted([*outlived, *final]) == ["1", "2"] and len(final) == 1
    for trainer in done[1:]:
        assert trainer.stderr.count("Traceback") == 1
        assert "ValueError: planted" in trainer.stderr


@pytest.mark.parametrize("transport", [pytest.param("rpc", marks=pytest.mark.slow), "collective"])
def test_a_busy_server_is_waited_for(tmp_path: Path, transport: str) -> None:
    """The server may write or test for longer than --timeout, which limits silence only."""
    script = planted(tmp_path, PLANTED + "def delay(): time.sleep(20)")
    args = [*SINUSOID, "--ps-transport", transport, "--iterations", "5", "--timeout", "15"]
    args += ["--run-dir", str(tmp_path / "run")]
    run([*torchrun(2, [script]), *args], timeout=120)
    assert result(tmp_path / "run")["tasks"] == 8


@pytest.mark.parametrize("flag", ["--ps-mode async", "--ps-mode backup", "--ps-forward remote"])
def test_collectives_are_synchronous(flag: str) -> None:
    with pytest.raises(UserError, match=f"{flag} needs --ps-transport rpc"):
        parse([*SINUSOID, "--ps-transport", "collective", *flag.split()])
