"""Random draws in a network of one's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from tests.library.own_networks import Blockwise, Tasks, dense, made


class Skipping(nn.Linear):
    """A layer that is skipped by chance, or whose draws restore the generator."""

    def __init__(self, *, forked: bool) -> None:
        super().__init__(8, 8)
        self.forked = forked

    def forward(self, x: Tensor) -> Tensor:
        if self.forked:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return super().forward(F.dropout(x))
        return x if torch.rand(()) < 0.5 else super().forward(x)


def dropping(drop: nn.Module) -> Blockwise:
    block = nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), drop
    return Blockwise(8, *block, again=True).double()


@pytest.mark.parametrize(
    "drop", [nn.Dropout(0.5), Skipping(forked=False), Skipping(forked=True)], ids=str
)
def test_draws_do_not_depend_on_threads_nor_on_what_came_before(drop: nn.Module) -> None:
    network = dropping(drop)
    network.again = not getattr(drop, "forked", False)
    learner, tasks = maml.MAML(network, inner_lr=0.1, inner_steps=2), made((6,) * 4)

    def gradient(threads: int, tasks: Tasks) -> Tensor:
        network.zero_grad()
        torch.manual_seed(3)
        torch.set_num_threads(threads)
        learner(tasks).backward()
        weight = next(network.block.parameters())
        assert weight.grad is not None
        return weight.grad.clone()

    for some in (tasks[:1], tasks):
        first = gradient(1, some)
        assert all(torch.equal(gradient(2, some), first) for _ in range(3))


def test_what_draws_in_later_tasks_alone_draws_otherwise_each_time() -> None:
    class OfLargeSets(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) > 6 else x

    learner = maml.MAML(dropping(OfLargeSets()))
    learner(made())
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found += [learner(made((9, 9, 6))).item(), learner(made((9, 9, 6))).item()]
    assert found[:2] == found[2:4]
    assert len({*found}) == 4
    begins = maml.MAML(dense(nn.Dropout(0.0)))
    (rate,) = (m for m in begins.modules() if isinstance(m, nn.Dropout))
    assert begins(made()) == begins(made())
    rate.p = 0.5
    assert begins(made()) != begins(made())
