"""Processes that were started with different flags do not train together."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from maml.config import MUST_MATCH, OF_A_HOST
from maml.config.cli import parse
from maml.trainer import Trainer
from tests.launching import TRAIN, run, start, start_ranks
from tests.runs import metrics

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--iterations", "3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "others", "said"),
    [
        ([], ["--seed", "1"], "--seed is 0 on rank 0 and 1 on rank 1"),
        # Without a word they would wait for each other in different transports.
        (
            ["--strategy", "rpc"],
            ["--strategy", "allreduce"],
            "--strategy is rpc on rank 0 and allreduce on rank 1",
        ),
    ],
)
def test_other_flags_end_the_start(
    tmp_path: Path, flags: list[str], others: list[str], said: str
) -> None:
    args = [*SINUSOID, "--run-dir", str(tmp_path)]
    ranks = start_ranks(2, args, own={0: flags, 1: others})
    done = [launched.wait(60, expect=None) for launched in ranks]
    assert [rank.returncode for rank in done] == [2, 2]
    line = f"error: {said}: start all processes with the same flags"
    assert done[0].stderr.strip().splitlines()[-1] == line
    assert "error" not in done[1].stderr


def test_what_is_a_host_s_own(tmp_path: Path) -> None:
    """Folders, the number of threads, and the checkpoint, which rank zero alone reads."""
    first = ["--run-dir", str(tmp_path / "first"), "--iterations", "1"]
    assert Trainer(parse([*SINUSOID, *first])).run() == 0
    saved = tmp_path / "first" / "checkpoints" / "last.pt"
    own = {
        0: ["--run-dir", str(tmp_path / "0"), "--resume", str(saved)],
        1: [
            *("--run-dir", str(tmp_path / "1"), "--resume", str(tmp_path / "not here.pt")),
            *("--data-root", str(tmp_path), "--threads", "2"),
        ],
    }
    for launched in start_ranks(2, SINUSOID, own=own):
        launched.wait(60)
    assert [row["iteration"] for row in metrics(tmp_path / "0")][-1] == 3
    assert not (tmp_path / "1").exists()


def test_what_decides_the_result_must_agree() -> None:
    assert set(OF_A_HOST).isdisjoint(MUST_MATCH)


ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 .*at least 1"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 .*0 to"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment, but no RANK"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 in the environment, but no MASTER_ADDR"),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 .*1 to 1"),
    ({"RANK": "x"}, "RANK=x .*must be a number"),
]


def test_a_job_scripts_environment(tmp_path: Path) -> None:
    """All at the same time: one that is not rank zero gives that one time to speak first."""
    command = [*TRAIN, *SINUSOID, "--run-dir", str(tmp_path / "run")]
    started = [start(command, env=env) for env, _ in ENVIRONMENTS]
    for launched, (_, says) in zip(started, ENVIRONMENTS, strict=True):
        (line,) = launched.wait(60, expect=2).stderr.splitlines()
        assert re.match(f"error: {says}", line), line
    assert not (tmp_path / "run").exists()


def test_alone_nobody_is_met(tmp_path: Path) -> None:
    """A world of one, as some launchers make it, needs no address."""
    strategies = {name: [*SINUSOID, "--strategy", name] for name in ("rpc", "allreduce")}
    command = ["-m", "tests.strategies.topologies", str(tmp_path), json.dumps(strategies)]
    run([sys.executable, *command], timeout=60, env={"RANK": "0", "WORLD_SIZE": "1"})
    for name in strategies:
        assert metrics(tmp_path / name)[-1]["iteration"] == 3
