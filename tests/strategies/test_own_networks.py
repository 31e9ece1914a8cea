"""Networks as others write them: they draw, recur, attend, branch, share and change tensors.

One network has it all. Its gradient is that of a plain loop with ``create_graph``, on every
topology, and a run that goes on has the same bits.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from datasets import Episodes, Task
from datasets.generators import LOCK, begin, kept, seed_of
from maml.config.cli import parse
from maml.metagradient.problem import Problem
from maml.params import Params
from maml.trainer import Trainer
from maml.worker import Worker
from tests.launching import run, torchrun
from tests.metagradient.peer import by_hand
from tests.runs import last


class Everything(nn.Module):
    """An LSTM, an attending layer, two of one weight, dropout, an ``if`` and a counter."""

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        super().__init__()
        self.rows = nn.LSTM(image_shape[2], 8, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, ways)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[E, 1, H, W]`` to logits ``[E, N]``."""
        self.calls += 1
        h = self.layer(self.rows(x[:, 0, ::4])[0])[:, -1] * self.calls
        h = self.two(torch.tanh(self.one(h)))
        return self.head(self.drop(torch.tanh(h) if h.mean() > 0 else h))


class Unsent(Everything):
    """No pickle can contain it, so RPC cannot send it."""

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        super().__init__(image_shape, ways)
        self.drop.register_forward_hook(lambda module, given, out: None)


class Unequal(Episodes):
    """Tasks of 2 to 4 classes, with 1 to 3 examples of each."""

    def __init__(self, split: str) -> None:
        """The base class needs nothing."""

    def tasks(self, ids: Tensor) -> list[Task]:  # type: ignore[override]
        """Return a list: their sets are of different sizes."""
        return [self._one(id) for id in ids.tolist()]

    def _one(self, id: int) -> Task:
        dice = torch.Generator().manual_seed(id)
        y = torch.arange(2 + id % 3).repeat(1 + id % 2)
        x = torch.rand(2, len(y), 1, 28, 28, generator=dice, dtype=torch.float64)
        return Task(x[0], y, x[1], y)


WORDS = [
    *("maml-glyphs-5way-1shot", "--network", "tests.strategies.test_own_networks:Everything"),
    *("--iterations", "4", "--meta-batch-size", "3", "--inner-steps", "2", "--dtype", "float64"),
    *("--meta-optimizer", "sgd", "--meta-lr", "0.1", "--seed", "5", "--logger", "none"),
    *("--eval-every", "4", "--eval-tasks", "3", "--test-tasks", "0"),
]


OF_ANY_SIZES = ["--data", "tests.strategies.test_own_networks:Unequal"]


@pytest.mark.parametrize(
    ("steps", "threads", "more"),
    [(2, 1, []), (9, 2, []), (2, 2, OF_ANY_SIZES)],  # of 9 steps, some are computed again
)
def test_equals_a_plain_loop(steps: int, threads: int, more: list[str]) -> None:
    config = parse([*WORDS, "--inner-steps", str(steps), *more])
    torch.set_num_threads(threads)
    worker = Worker(config, torch.device("cpu"))
    ids = torch.tensor([4, 0, 7])
    params = worker.learner.meta_parameters()
    found = worker.share(params, ids, worker.learner)
    network = Everything((1, 28, 28), 5).double()
    start = {name: params[f"network.module.{name}"] for name, _ in network.named_parameters()}

    def loss(part: str, at: Params, id: Tensor, step: int) -> tuple[Tensor, Tensor]:
        made = worker.training.tasks(id[None])
        task = made[0] if isinstance(made, list) else made
        x, y = getattr(task, f"{part}_x")[0], getattr(task, f"{part}_y")[0]
        begin(seed_of(5, f"{part} {step}", int(id), "train"))
        at = {**at, "calls": torch.zeros((), dtype=torch.float64)}
        value = nn.functional.cross_entropy(torch.func.functional_call(network, at, (x,)), y)
        return value, value

    losses = partial(loss, "support"), partial(loss, "query")
    # The lock: after `share`, a thread makes the next tasks, and seeds the generators.
    with LOCK, kept(), sdpa_kernel(SDPBackend.MATH):
        expected = by_hand(Problem(start, *losses, lr=config.inner_lr, steps=steps), ids)
    total = expected.losses.sum().item()
    assert float(found.totals[0]) == pytest.approx(total, rel=1e-12)
    for name, gradient in expected.gradients.start.items():
        torch.testing.assert_close(
            found.gradients[f"network.module.{name}"], gradient, rtol=1e-10, atol=1e-12
        )


def test_any_topology_trains_the_same_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """On tasks whose sets are of different sizes."""

    def trained(name: str, *more: str) -> dict[str, Tensor]:
        words = [*WORDS, *OF_ANY_SIZES, "--run-dir", str(tmp_path / name), *more]
        assert Trainer(parse(words)).run() == 0
        return last(tmp_path / name)["model"]

    whole = trained("whole")
    trained("parts", "--iterations", "2")
    parts = trained("parts", "--resume", "auto")
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    for strategy, network in (("rpc", "Everything"), ("rpc", "Unsent"), ("allreduce", "Unsent")):
        run_dir = tmp_path / (strategy + network)
        own = ["--network", f"tests.strategies.test_own_networks:{network}", "--strategy", strategy]
        words = [*WORDS, *OF_ANY_SIZES, *own, "--run-dir", str(run_dir)]
        run([*torchrun(2), *words], timeout=120)
        torch.testing.assert_close(last(run_dir)["model"], whole, rtol=1e-10, atol=1e-12)
