"""The rpc strategy: what travels, calls that wait for each other, and who leaves last."""

import re
from pathlib import Path

import pytest
from torch.distributed.rpc.internal import _internal_rpc_pickler

from maml.strategies.rpc import Reference
from tests.launching import run, start_ranks, torchrun
from tests.runs import metrics, same, worker_of
from tests.strategies.faults import SINUSOID, planted

FORGETS = """
from maml.strategies.rpc import Rpc
row = Rpc.row
def forget(self, task, step, work):
    return row(self, task, step, work and (work[0].detach(), *work[1:]))
Rpc.row = forget
"""


def test_a_missing_gradient_is_refused(tmp_path: Path) -> None:
    """Rank 1 loses the graph, so the gradient would lack rank 1's tasks: no step is taken."""
    args = [*SINUSOID, "--strategy", "rpc", "--run-dir", str(tmp_path / "run")]
    ranks = start_ranks(2, args, script=planted(tmp_path, FORGETS))
    done = [rank.wait(60, expect=1) for rank in ranks]
    assert re.search(r"error: rank 1 .* parameters came outside the graph", done[0].stderr)


def test_a_learner_travels_without_parameters() -> None:
    """The pickled learner does not grow with its parameters, which follow as one tensor."""
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
    done = run([*torchrun(size), *args], timeout=180)
    assert metrics(tmp_path)[-1]["iteration"] == 2
    assert ("--partition chunk trains the same" in done.stdout) == (partition == "exclusive")


PARTS_LATE = """
from torch.distributed import rpc
from maml.processes.store import own_connection
from maml.processes.world import World
shutdown = rpc.shutdown
def slowly(**kwargs):
    shutdown(**kwargs)
    if os.environ["RANK"] == "1":
        time.sleep(2)
        own_connection(World.from_environment(), "test").add("still there", 1)
rpc.shutdown = slowly
"""


def test_rank_zero_is_the_last_to_leave(tmp_path: Path) -> None:
    """Without torchrun, rank 0 holds the store, which a slower rank needs until it has left."""
    args = [*SINUSOID, "--strategy", "rpc", "--iterations", "3", "--run-dir", str(tmp_path / "run")]
    for rank in start_ranks(2, args, script=planted(tmp_path, PARTS_LATE)):
        rank.wait(60)
