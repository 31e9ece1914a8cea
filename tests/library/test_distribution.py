"""``maml.distributed()``: a loop of one's own under torchrun."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import maml
from tests.launching import run, torchrun
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


def refused(rank: int) -> None:
    """Tasks in another number, order, value or size."""
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
