"""Processes with different flags do not train together, nor do those with other parameters."""

from pathlib import Path

import pytest

from maml.config.cli import parse
from maml.errors import UserError
from maml.processes.world import World
from maml.trainer import Trainer
from tests.launching import run, start_ranks, torchrun
from tests.runs import metrics
from tests.strategies import faults

SINUSOID = [*faults.SINUSOID, "--iterations", "3"]


def test_other_flags_end_the_start(tmp_path: Path) -> None:
    """Without this error, the ranks would wait for each other in different transports."""
    flags = {0: ["--strategy", "rpc"], 1: ["--strategy", "allreduce"]}
    ranks = start_ranks(2, [*SINUSOID, "--run-dir", str(tmp_path)], own=flags)
    done = [launched.wait(60, expect=None) for launched in ranks]
    assert [rank.returncode for rank in done] == [2, 2]
    said = "--strategy is rpc on rank 0 and allreduce on rank 1"
    line = f"error: {said}: start all processes with the same flags"
    assert done[0].stderr.strip().splitlines()[-1] == line
    assert "error" not in done[1].stderr


def test_what_is_a_host_s_own(tmp_path: Path) -> None:
    """Folders, threads, batching and the checkpoint: only rank 0 reads the checkpoint."""
    first = ["--run-dir", str(tmp_path / "first"), "--iterations", "1"]
    assert Trainer(parse([*SINUSOID, *first])).run() == 0
    saved = tmp_path / "first" / "checkpoints" / "last.pt"
    own = {
        0: ["--run-dir", str(tmp_path / "0"), "--resume", str(saved)],
        1: [
            *("--run-dir", str(tmp_path / "1"), "--resume", str(tmp_path / "not here.pt")),
            *("--data-root", str(tmp_path), "--threads", "2", "--batching", "tasks"),
        ],
    }
    for launched in start_ranks(2, SINUSOID, own=own):
        launched.wait(60)
    assert [row["iteration"] for row in metrics(tmp_path / "0")][-1] == 3
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 .*at least 1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 .*0 to"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment, but no RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 in the environment, but no MASTER_ADDR"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 .*1 to 1"),
        ({"RANK": "x"}, "RANK=x .*must be a number"),
    ],
)
def test_a_job_scripts_environment(
    env: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        World.from_environment()


DIVERGES = """
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.processes.collectives import Collectives
step, of_all = OuterOptimizer.step, Collectives.of_all
def broken(self, *args):
    loss = step(self, *args)
    if os.environ["RANK"] == "1":
        next(iter(self.params.values())).add_(1e-6)
    return loss
def late(*args):
    found = of_all(*args)
    time.sleep(2 * (os.environ["RANK"] == "0"))
    return found
OuterOptimizer.step, Collectives.of_all = broken, late
"""


def test_diverged_parameters_are_found(tmp_path: Path) -> None:
    """The next check finds rank 1's changed parameters, also when rank 1 reports them first."""
    args = [*SINUSOID, "--strategy", "allreduce", "--iterations", "10", "--check-every", "2"]
    command = [*torchrun(2, [faults.planted(tmp_path, DIVERGES)]), *args]
    done = run([*command, "--run-dir", str(tmp_path / "run")], timeout=120, expect=None)
    assert done.returncode != 0
    assert "error: rank 1 holds other parameters than rank 0" in done.stderr
