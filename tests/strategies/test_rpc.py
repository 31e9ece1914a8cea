"""The rpc strategy: what travels, many tasks on few threads, and who leaves last."""

import re
from pathlib import Path

import pytest
from torch.distributed.rpc.internal import _internal_rpc_pickler

from maml.strategies.rpc import Reference
from tests.launching import run_torchrun, start_ranks
from tests.runs import metrics, same
from tests.strategies.faults import planted
from tests.workers import worker_of

SINUSOID = [
    *("maml-sinusoid-10shot", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    *("--compile", "off"),
]  # fmt: skip


FORGETS = """
from maml.strategies import rpc
def forget(step, flat, calls):
    rpc.this(rpc.Rpc).gathering.begin(step, flat.detach(), calls)
rpc._begin = forget
"""


def test_a_missing_gradient_is_refused(tmp_path: Path) -> None:
    """Where rank 1 has lost the graph, a gradient without its tasks would come home: no step."""
    args = [*SINUSOID, "--strategy", "rpc", "--run-dir", str(tmp_path / "run")]
    ranks = start_ranks(2, args, script=planted(tmp_path, FORGETS))
    done = [rank.wait(60, expect=1) for rank in ranks]
    assert re.search(r"error: rank 1 .* parameters came outside the graph", done[0].stderr)


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
    assert metrics(tmp_path)[-1]["iteration"] == 2


PARTS_LATE = """
from torch.distributed import rpc
from maml.processes.store import launchers_store
from maml.processes.world import World
shutdown = rpc.shutdown
def slowly(**kwargs):
    shutdown(**kwargs)
    if os.environ["RANK"] == "1":
        time.sleep(2)
        launchers_store(World.from_environment()).add("still there", 1)
rpc.shutdown = slowly
"""


def test_rank_zero_is_the_last_to_leave(tmp_path: Path) -> None:
    """Without torchrun it holds the store, which a slower process needs until it has left."""
    args = [*SINUSOID, "--strategy", "rpc", "--iterations", "3", "--run-dir", str(tmp_path / "run")]
    for rank in start_ranks(2, args, script=planted(tmp_path, PARTS_LATE)):
        rank.wait(60)
