"""launch/slurm.sbatch on a real Slurm of two nodes: pre-empted, out of time, and requeued.

It needs Debian's packages slurmctld, slurmd, slurm-client and munge, and root. With
``MAML_TEST_SLURM=install`` they are installed by apt-get; else these tests skip without them.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from maml.learners.maml import MAML
from maml.metagradient.problem import Problem
from maml.params import Params
from maml.run.files import read_rows
from tests.launch.cluster import Cluster, missing
from tests.launching import REPO, run, torchrun
from tests.network import why_not
from tests.runs import last, metrics, same

pytestmark = pytest.mark.slow


class Slow(MAML):
    """MAML with 30 ms in each step, so that it can be interrupted on a fast machine, too."""

    def problem(self, meta_params: Params, steps: int) -> Problem:
        time.sleep(0.03)
        return super().problem(meta_params, steps)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why_not():
        pytest.skip(why_not())
    if missing() and os.environ.get("MAML_TEST_SLURM") == "install":
        install = ["apt-get", "install", "-y", "--no-install-recommends", *missing()]
        subprocess.run(["apt-get", "update"], check=False, timeout=300)
        subprocess.run(install, check=False, timeout=600)
    if missing():
        pytest.skip(f"no {', '.join(missing())} here (MAML_TEST_SLURM=install gets them)")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def checkout(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder to submit from, whose runs are its own. Its jobs go with it."""
    for name in ("train_maml.py", "maml", "datasets", "launch", "tests"):
        (tmp_path / name).symlink_to(REPO / name)
    yield tmp_path
    cluster.command("scancel", "--user=root")


def submitted(cluster: Cluster, folder: Path, *words: str) -> str:
    options = ("--parsable", f"--chdir={folder}", f"--output={cluster.folder}/%x-%j.log")
    return cluster.command("sbatch", *options, *words).strip()


def iteration(folder: Path) -> int:
    """Return how far the only run in ``folder`` is; 0 before there is one."""
    rows = [row for path in folder.glob("runs/*/metrics.jsonl") for row in read_rows(path)]
    return max((row["iteration"] for row in rows), default=0)


SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off", "--threads", "1", "--meta-batch-size", "4", "--log-every", "1"),
    *("--checkpoint-every", "50", "--iterations", "300", "--strategy", "allreduce"),
    *("--learner", "tests.launch.test_slurm:Slow"),
]  # fmt: skip


def test_a_training_may_begin_with_a_flag(tmp_path: Path) -> None:
    """A sweep of two nodes would be refused."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "srun").chmod(0o755)
    given = {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "a", "SLURM_JOB_NODELIST": "a"}
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1", **given}
    command = ["bash", "launch/slurm.sbatch", "--config=run/config.yaml"]
    assert ' train "$@" train ' in subprocess.check_output(command, text=True, env=env, cwd=REPO)


def test_a_job_goes_on_after_each_interruption(cluster: Cluster, checkout: Path) -> None:
    """Pre-empted by a better job, then out of time: it ends with the undisturbed run's bits."""
    run([*torchrun(2), *SINUSOID, "--run-dir", str(checkout / "straight")], timeout=150)
    number = submitted(cluster, checkout, "--nodes=2", "launch/slurm.sbatch", *SINUSOID)

    log = cluster.folder / f"maml-{number}.log"

    def interrupted(restarts: int) -> bool:
        return cluster.job(number)["Restarts"] == str(restarts)

    cluster.until(lambda: iteration(checkout) >= 20)
    submitted(cluster, checkout, "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    cluster.until(lambda: interrupted(1))
    cluster.until(lambda: log.read_text().count("2 processes, iterations") == 2)
    reached = iteration(checkout)
    cluster.until(lambda: iteration(checkout) >= reached + 20)
    # What Slurm does at --signal's time, minutes before the end.
    cluster.command("scancel", "--batch", "--signal=USR1", number)
    cluster.until(lambda: interrupted(2))
    ends = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    cluster.until(lambda: cluster.job(number)["JobState"] in ends)
    said = log.read_text()
    assert cluster.job(number)["JobState"] == "COMPLETED", said

    (run_dir,) = (checkout / "runs").iterdir()
    assert [row["iteration"] for row in metrics(run_dir)] == list(range(1, 301))
    starts = yaml.safe_load((run_dir / "config.yaml").read_text())["starts"]
    began = [start["iteration"] for start in starts]
    assert 0 == began[0] < began[1] < began[2] < 300
    assert run_dir.name == f"slurm-{number}"
    assert all(start["processes"] == 2 for start in starts)
    for count in (1, 2, 3):
        assert f"job {number}, start {count}, on host[0-1]: maml-sinusoid-10shot" in said
    # It stopped by itself, in time.
    assert f"stopped by SIGTERM after iteration {began[2]}; checkpoint" in said
    undisturbed = last(checkout / "straight")
    for part in ("model", "optimizer"):
        assert same(last(run_dir)[part], undisturbed[part])
