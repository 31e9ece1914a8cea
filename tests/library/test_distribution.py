"""``maml.distributed()``: a loop of one's own under torchrun."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from maml.processes.collectives import device_for
from tests.launching import run, start_ranks, torchrun
from tests.library.own_networks import (
    Branching,
    Judge,
    Tempered,
    Waves,
    dense,
    learning,
    made,
    stacked,
)


def of_experts(seed: int) -> list[Tensor]:
    """The data say which of two layers answers, so one process may meet only one of them."""
    torch.manual_seed(seed)
    learner, tasks = maml.MAML(Branching().double(), inner_lr=0.1), made()[:2]
    for sign, task in zip((1, -1), tasks, strict=True):
        task[0][0, 0] = task[2][0, 0] = sign
    learner(tasks).backward()
    return [parameter.grad for parameter in learner.parameters() if parameter.grad is not None]


def of_waves(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    network, loss = Waves(), Tempered().double()
    maml.MAML(network, loss=loss, inner_lr=0.1, inner_steps=2)(stacked(made())).backward()
    return [*(p.grad for p in network.parameters()), *(p.grad for p in learning(loss))]  # type: ignore[misc]


def trained(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    network = dense()
    network.register_buffer("table", (torch.arange(10, dtype=torch.int16) + seed)[::2])
    network.register_buffer("wide", torch.full((1,), float(seed)).expand(3))
    network.register_buffer("sparse", (torch.eye(3 + seed) + seed)[:3, :3].to_sparse())
    network.attributes = [torch.rand(2)]  # type: ignore[assignment]
    network.plain = {"mask": np.full(2, seed), "gain": float(seed)}  # type: ignore[assignment]
    learner = maml.MAML(network, loss=Judge(), inner_lr=0.1, inner_steps=2)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = learner(stacked(made()))
        loss.backward()
        optimizer.step()
    ours: Any = next(m for m in learner.modules() if hasattr(m, "attributes"))
    held = [*ours.attributes, *map(torch.as_tensor, ours.plain.values())]
    return [
        loss.detach(),
        *held,
        *learner.state_dict().values(),
        *of_experts(seed),
        *of_waves(seed),
    ]


def smooth(by: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=by)


def differing(rank: int) -> dict[str, Callable[[], object]]:
    """Return what makes a meta-learner, another on each rank, by what the refusal says."""

    def of(network: nn.Module, **given: Any) -> Callable[[], object]:
        return lambda: maml.MAML(network, **given)

    shaped, ordered, attributed, frozen, wide = (dense() for _ in range(5))
    shaped.register_buffer("table", torch.zeros(2 + rank))
    for name in ("ab", "ba")[rank]:
        ordered.register_buffer(name, torch.zeros(1))
    attributed.masks = [torch.ones(3)] * rank  # type: ignore[assignment]
    frozen[1].weight.requires_grad_(not rank)  # type: ignore[index]
    judged = Judge()
    judged.body.weight.data = torch.zeros(3, 3 + rank)
    wide[3] = nn.Linear(8, 3 + rank).double()  # type: ignore[operator]
    return {
        "the learner is MAML on rank 0 and ANIL": (
            lambda: (maml.ANIL if rank else maml.MAML)(dense(), head="3")
        ),
        "head is 3 on rank 0 and 1": (lambda: maml.ANIL(dense(), head="31"[rank])),
        "inner_lr is 0.1 on rank 0 and 0.5": of(dense(), inner_lr=(0.1, 0.5)[rank]),
        "inner_steps is 1 on rank 0 and 2": of(dense(), inner_steps=1 + rank),
        "batching is auto on rank 0 and tasks": of(dense(), batching=("auto", "tasks")[rank]),
        r"the loss is .*smooth\..*": of(dense(), loss=smooth(0.1 * rank)),
        r"the loss is functools.partial": of(
            dense(), loss=functools.partial(F.cross_entropy, label_smoothing=0.1 * rank)
        ),
        "the loss is .*cross_entropy .* Judge": of(dense(), loss=Judge() if rank else None),
        "loss.body.weight is": of(dense(), loss=judged),
        "dtype is float64 on rank 0 and float32": of(dense().float() if rank else dense()),
        r"part 3 is .*out_features=3.* on rank 0 and Linear\(.*out_features=4": of(wide),
        "part 2 is Tanh": of(dense(*[nn.Linear(8, 8)] * rank)),
        "part 2 is .*p=0.1.* on rank 0 and .*p=0.2": of(dense(nn.Dropout(0.1 * (1 + rank)))),
        "part 2 is .* evaluation mode": of(dense(nn.Dropout(0.1).train(not rank))),
        "1.weight is float64 .* on rank 0 and frozen": of(frozen),
        r"table is float32 \[2\] on rank 0": of(shaped),
        "the parts of rank 1 are in another order": of(ordered),
        r"masks\[0\] is missing on rank 0": of(attributed),
    }


def refused(rank: int) -> None:
    """Another meta-learner, or tasks in another number, order, value or size."""
    for line, make in differing(rank).items():
        with pytest.raises(maml.UserError, match=f"^{line}.*: under maml.distributed"):
            make()
    slow, quick = (maml.MAML(dense(), inner_lr=lr) for lr in (0.1, 0.2))
    with pytest.raises(maml.UserError, match=r"^inner_lr is 0.1 on rank 0 and 0.2 on rank 1"):
        (quick if rank else slow)(made())
    with pytest.raises(maml.UserError, match=r"in evaluation mode on rank 1"):
        slow.train(not rank)(made())
    with pytest.raises(maml.UserError, match=r"^rank 1 begins to make .* and rank 0 to call one"):
        maml.MAML(dense()) if rank else slow(made())
    tasks, learner = made(), maml.MAML(dense())
    if rank:
        learner.load_state_dict({n: t + 0.01 for n, t in learner.state_dict().items()})
    with pytest.raises(maml.UserError, match=r"^the parameters of rank 1 are not those"):
        learner(tasks)
    learner = maml.MAML(dense())
    moved = stacked([(a + 1e-12 * rank, *rest) for a, *rest in tasks])  # type: ignore[misc]
    named = [({"ab"[rank]: a, "ba"[rank]: a.sin()}, b, a, b) for a, b, *_ in tasks]
    for own in (tasks[rank:], tasks[:: 1 - 2 * rank], moved, made((6, 6, 5 + rank)), named):
        with pytest.raises(maml.UserError, match=r"^the tasks of rank 1 are not those"):
            learner(own)


def test_a_loop_of_one_s_own_is_distributed_by_torchrun(tmp_path: Path) -> None:
    """All processes have the parameters of rank 0, whatever they drew, or refuse the tasks."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, torch, maml\nfrom tests.library.test_distribution import refused, trained\n"
        "rank = maml.distributed()\nrefused(rank)\n"
        "torch.save(trained(rank), f'{sys.argv[1]}.{rank}')\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    run([*torchrun(2, [str(script), str(tmp_path / "both")])], 120, env=env)
    for rank in range(2):
        found = torch.load(tmp_path / f"both.{rank}", weights_only=True)
        torch.testing.assert_close(found, trained(0), rtol=1e-10, atol=1e-12)


def test_a_process_group_takes_tensors_of_a_device_that_it_has_a_backend_for() -> None:
    cpu, cuda, mps = map(torch.device, ("cpu", "cuda", "mps"))
    assert device_for("cpu:gloo,cuda:nccl", cuda) == cuda
    assert device_for("cpu:gloo,cuda:gloo", mps) == device_for("cpu:gloo", cpu) == cpu
    assert device_for("cuda:nccl", cpu) == cuda


LOOP = """
import os, signal, sys, time
import torch.distributed as dist
import maml
from tests.library.own_networks import dense, made

how, bad, *own_group = sys.argv[1:]
if own_group:
    dist.init_process_group("gloo")
group = dist.group.WORLD
rank = maml.distributed(timeout=4)
assert dist.group.WORLD is group or not own_group
learner = maml.MAML(dense())
for call in range(4):
    if call == 2 and rank == int(bad):
        match how:
            case "leaves": break
            case "ends": os._exit(0)
            case "fails": raise ValueError("mine")
            case "stops": os.kill(os.getpid(), signal.SIGSTOP)
            case "hangs": time.sleep(3600)
    learner(made()).backward()
"""
NAMED = r"WorkerLostError: .*rank {} \(host \S+, pid \d+\) {}"
LEAVES = "left after call 2: every rank must make the same calls"
QUICK = {
    ("stops", 1): r"is stopped by a signal: silent for \d s \(timeout=4\)",
    ("hangs", 0): "hangs, or needs more time than that",
}
SLOW = {("ends", 1): "was killed", ("fails", 0): "failed: ValueError: mine", ("leaves", 0): LEAVES}


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_by_the_call_that_waits_for_it(
    tmp_path: Path, cases: dict[tuple[str, int], str]
) -> None:
    """The call of the other rank raises, and this rank ends with an error."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    pairs = [start_ranks(2, [how, str(bad)], script=str(script)) for how, bad in cases]
    for ranks, ((_, bad), line) in zip(pairs, cases.items(), strict=True):
        done = ranks[1 - bad].wait(60, expect=1)
        assert re.search(NAMED.format(bad, line), done.stderr)
        ranks[bad].kill()


def test_a_rank_that_leaves_early_is_named_by_all_others(tmp_path: Path) -> None:
    """The process group of the user stays as it is. The summary of torchrun has the line, too."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    done = run(torchrun(3, [str(script), "leaves", "1", "own group"]), 60, expect=1)
    assert len(re.findall(NAMED.format(1, LEAVES), done.stderr)) == 2
    assert "error: rank 1 (" in done.stderr
