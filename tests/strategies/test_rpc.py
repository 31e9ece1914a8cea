"""The rpc strategy: what travels, many tasks on few threads, and who leaves last."""

import json
from pathlib import Path

import pytest
from torch.distributed.rpc.internal import _internal_rpc_pickler

from maml.strategies.rpc import Reference
from tests.launching import run, run_torchrun, start_ranks, torchrun
from tests.runs import same
from tests.workers import worker_of

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off"),
]  # fmt: skip


def test_a_missing_gradient_is_refused() -> None:
    """It ends as a run does that fails: rank 1 has nobody to say goodbye to."""
    done = run(torchrun(2, ["-m", "tests.strategies.rpc_checks"]), timeout=120)
    assert done.stdout == "holds\n"


def test_a_learner_travels_without_parameters() -> None:
    """What is pickled of it does not grow with them: they follow as one tensor."""
    learner = worker_of("maml-glyphs-5way-1shot").learner
    params = learner.meta_parameters()
    pickled, tensors = _internal_rpc_pickler.serialize(Reference(learner))
    # 450 kB of parameters.
    assert not tensors and len(pickled) < 10_000, len(pickled)
    arrived = _internal_rpc_pickler.deserialize(pickled, tensors).put(params)
    assert arrived is not learner
    assert same(arrived.meta_parameters(), params)


@pytest.mark.parametrize(
    ("partition", "size"),
    [
        ("exclusive", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("exclusive", 3), ("chunk", 2))),
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
