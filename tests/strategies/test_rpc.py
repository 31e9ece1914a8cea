"""The rpc strategy: what travels, many tasks on few threads, and who leaves last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run, run_torchrun, start_ranks, torchrun

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "checks"),
    [
        (1, ["learner_travels_without_parameters"]),
        # It ends as a run does that fails: rank 1 has nobody to say goodbye to.
        (2, ["missing_gradient_is_refused"]),
    ],
)
def test_facts(size: int, checks: list[str]) -> None:
    """Each of `tests.strategies.rpc_checks`, in worlds of their own."""
    command = [*torchrun(size, ["-m", "tests.strategies.rpc_checks"]), *checks]
    done = run(command, timeout=120)
    assert done.stdout.splitlines() == [f"{check}: holds" for check in checks]


@pytest.mark.parametrize(
    ("partition", "size"),
    [
        ("exclusive", 2),
        pytest.param("exclusive", 1, marks=pytest.mark.slow),
        pytest.param("exclusive", 3, marks=pytest.mark.slow),
        pytest.param("chunk", 2, marks=pytest.mark.slow),
    ],
)
def test_many_tasks_on_few_threads_finish(tmp_path: Path, partition: str, size: int) -> None:
    """128 tasks on workers with 2 threads each: no call holds a thread while it waits."""
    args = [*SINUSOID, "--meta-batch-size", "128", "--iterations", "2", "--rpc-threads", "2"]
    args += ["--partition", partition, "--run-dir", str(tmp_path)]
    run_torchrun(size, args, timeout=180)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 2


def test_rank_zero_is_the_last_to_leave(tmp_path: Path) -> None:
    """Without torchrun it holds the store, which a slower process needs until it has left."""
    script = tmp_path / "slow_goodbye.py"
    script.write_text(
        "import os, sys, time\n"
        "from torch.distributed import rpc\n"
        "from maml.processes.program import run_program\n"
        "from maml.processes.store import launchers_store\n"
        "from maml.processes.world import World\n"
        "import train_maml\n"
        "if os.environ['RANK'] == '1':\n"
        "    shutdown = rpc.shutdown\n"
        "    def slowly(**kwargs):\n"
        "        shutdown(**kwargs)\n"
        "        time.sleep(2)\n"
        "        launchers_store(World.from_environment()).add('still there', 1)\n"
        "    rpc.shutdown = slowly\n"
        "run_program(train_maml.main, sys.argv[1:])\n"
    )
    args = [*SINUSOID, "--strategy", "rpc", "--iterations", "3", "--run-dir", str(tmp_path / "run")]
    for rank in start_ranks(2, args, script=str(script)):
        rank.wait(60)
