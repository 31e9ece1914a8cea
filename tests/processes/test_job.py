"""A job that is started again, without a --run-dir, goes on in the directory that it began."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from maml.run import directory
from maml.run.lock import Lock
from tests.launching import REPO, SLACK, start
from tests.runs import as_flags, last, metrics, sinusoid


def test_a_requeued_job_goes_on(tmp_path: Path) -> None:
    """Preempted, then started again by the scheduler with the same script."""
    flags = as_flags(sinusoid(iterations=10**9))
    command = [sys.executable, str(REPO / "train_maml.py"), *flags]
    for count in (1, 2):
        env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(count - 1)}
        launched = start(command, env=env, cwd=tmp_path)
        deadline = time.monotonic() + SLACK * 60
        while not [path for path in tmp_path.glob("runs/*/metrics.jsonl") if _starts(path) == count
                   and len(path.read_text().splitlines()) > 20 * count]:  # fmt: skip
            assert launched.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        launched.process.send_signal(signal.SIGTERM)
        launched.wait(60, expect=143)
    (directory,) = (tmp_path / "runs").iterdir()
    reached = last(directory)["iteration"]
    assert [row["iteration"] for row in metrics(directory)] == list(range(1, reached + 1))
    first, second = yaml.safe_load((directory / "config.yaml").read_text())["starts"]
    assert first["iteration"] == 0 < second["iteration"] < reached
    assert first["job"] == second["job"] == {"slurm": "7"}
    assert second["processes"] == 1 and second["device"] == "cpu"
    assert second["command"] == [str(REPO / "train_maml.py"), *flags]


def _starts(rows: Path) -> int:
    return len(yaml.safe_load((rows.parent / "config.yaml").read_text())["starts"])


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that this process has begun under torchrun, in a Slurm job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    # Longer than a line of YAML, which is folded.
    monkeypatch.setattr(platform, "node", lambda: f"node-7.{'partition.' * 12}example.org")
    run_dir = directory.choose(sinusoid())
    directory.write_config(run_dir, sinusoid())
    return run_dir


def _as_it_was(begun: Path, patch: pytest.MonkeyPatch) -> None:
    """The same torchrun starts its workers again."""


def _requeued(begun: Path, patch: pytest.MonkeyPatch) -> None:
    """Another torchrun, at the next start of the Slurm job."""
    _another_launcher(begun, patch)
    patch.setenv("SLURM_RESTART_COUNT", "1")


@pytest.mark.parametrize("again", [_as_it_was, _requeued])
def test_the_same_start_again(
    again: Callable[[Path, pytest.MonkeyPatch], None], begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(begun, monkeypatch)
    assert directory.choose(sinusoid()) == begun


def test_two_were_begun(begun: Path) -> None:
    """The newest: an older one was given up."""
    claim = Lock(begun)
    newer = directory.choose(sinusoid())
    claim.release()
    assert newer != begun
    time.sleep(0.01)
    directory.write_config(newer, sinusoid())
    assert directory.choose(sinusoid()) == newer


def _another_launcher(begun: Path, patch: pytest.MonkeyPatch) -> None:
    """Of the same name: users type it, and give a command twice to mean two runs."""
    patch.setattr(os, "getppid", lambda: 1)


def _the_same_number_again(begun: Path, patch: pytest.MonkeyPatch) -> None:
    """In a container that is started again, torchrun is process 1 of the same host each time."""
    patch.setattr("maml.processes.job.started", lambda pid: "later")


def _no_launcher(begun: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("TORCHELASTIC_RUN_ID")


def _another_job(begun: Path, patch: pytest.MonkeyPatch) -> None:
    _requeued(begun, patch)
    patch.setenv("SLURM_JOB_ID", "8")


def _another_command(begun: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [*sys.argv, "--seed", "1"])


def _damaged(begun: Path, patch: pytest.MonkeyPatch) -> None:
    (begun / "config.yaml").write_text(f"starts: [none by process {os.getppid()} of")


def _of_no_list(begun: Path, patch: pytest.MonkeyPatch) -> None:
    (begun / "config.yaml").write_text("starts: 3\n")


@pytest.mark.parametrize(
    "otherwise",
    [
        _another_launcher,
        _the_same_number_again,
        _no_launcher,
        _another_job,
        _another_command,
        _damaged,
        _of_no_list,
    ],
)
def test_otherwise_a_new_one(
    otherwise: Callable[[Path, pytest.MonkeyPatch], None],
    begun: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    otherwise(begun, monkeypatch)
    assert directory.choose(sinusoid()) != begun


def test_never_means_never(begun: Path) -> None:
    assert directory.choose(sinusoid(resume="never")) != begun
