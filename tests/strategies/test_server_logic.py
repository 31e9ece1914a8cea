"""What the parameter server waits for, drops and sums; the test plays its trainers."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maml.errors import UserError
from maml.processes.world import World
from maml.strategies.param_server import build_param_server
from maml.worker import Share, Worker
from tests.runs import same, sinusoid

IDS = torch.arange(7)
LIMIT_S = 100.0
"""A limit for what hangs, because all computations here take milliseconds."""


class Scaled(nn.Module):
    """A function reads its module's own parameter: in a copy, the copy's."""

    def __init__(self, shape: tuple[int], outputs: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.activation = lambda x: torch.tanh(self.scale * x)
        self.one, self.two = nn.Linear(*shape, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.activation(self.one(x)))


class Play:
    """A server on its own thread; its trainers are on the test's thread."""

    def __init__(self, pool: ThreadPoolExecutor, trainers: int, **values: Any) -> None:
        values = {"timeout": LIMIT_S, **values}
        config = sinusoid(strategy="param-server", dtype="float64", **values)
        self.worker = Worker(config, torch.device("cpu"))
        world = World(0, 1 + trainers, 0, 1 + trainers, launched=True)
        self.server: Any = build_param_server(config, world, self.worker)
        self.params = self.worker.learner.meta_parameters()
        self._pool = pool

    def step(self, iteration: int = 0) -> Future[Share]:
        """Start a step of the outer loop."""
        ids = self.worker.training.ids(iteration, len(IDS))
        return self._pool.submit(self.server.meta_step, self.params, ids)

    def ask(self, rank: int, result: Tensor | None = None) -> Any:
        """Push ``result`` and return the future of the next order."""
        return self.server.exchange(rank, result)

    def computed(self, order: Any) -> Tensor:
        """What a trainer makes of an order."""
        method, *given = order
        share: Tensor = method(self.server, *given)
        return share

    def expected(self, ids: torch.Tensor) -> Share:
        return self.worker.share(self.params, ids, self.worker.learner)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def assert_same(share: Share, expected: Share) -> None:
    assert share.n_tasks == expected.n_tasks
    torch.testing.assert_close(share.totals, expected.totals, rtol=0, atol=1e-12)
    torch.testing.assert_close(share.gradients, expected.gradients, rtol=0, atol=1e-12)


def test_sync_waits_for_all_and_sums_in_the_order_of_ranks(pool: ThreadPoolExecutor) -> None:
    """The bits are the same in any order of arrival."""
    shares = []
    for arrival in ((1, 2, 3), (3, 1, 2)):
        play = Play(pool, trainers=3)
        step = play.step()
        orders = {rank: play.ask(rank) for rank in (1, 2, 3)}
        for rank in arrival:
            assert not step.done()
            # The answer to a push comes with the next step, not before.
            after = play.ask(rank, play.computed(orders[rank].wait()))
        shares.append(step.result(LIMIT_S))
        assert not after.done()
    assert_same(shares[0], play.expected(IDS))
    assert same(shares[0].gradients, shares[1].gradients)


def test_backup_takes_the_first_and_drops_the_late(pool: ThreadPoolExecutor) -> None:
    play = Play(pool, trainers=3, ps_mode="backup", ps_backup_workers=1)
    step = play.step()
    orders = {rank: play.ask(rank).wait() for rank in (1, 2, 3)}
    answers = {rank: play.ask(rank, play.computed(orders[rank])) for rank in (1, 3)}
    # The divisor is the number of tasks summed, not the meta-batch size.
    arrived = torch.cat([orders[1][1], orders[3][1]])
    assert_same(step.result(LIMIT_S), play.expected(arrived))
    assert torch.equal(play.server.tasks_of_step(IDS), arrived) and len(arrived) < len(IDS)

    second = play.step(iteration=1)
    answers[2] = play.ask(2, play.computed(orders[2]))
    orders = {rank: answer.wait() for rank, answer in answers.items()}
    assert {begun for begun, _ in play.server.under_way.values()} == {1}, "the late one catches up"
    for rank in (2, 3):
        play.ask(rank, play.computed(orders[rank]))
    # What came too late for step 1 is in neither sum.
    assert_same(second.result(LIMIT_S), play.expected(torch.cat([orders[2][1], orders[3][1]])))
    assert play.server.report()["dropped"] == 1


def test_async_applies_each_and_drops_the_old(pool: ThreadPoolExecutor) -> None:
    play = Play(pool, trainers=2, ps_mode="async", ps_max_staleness=1)
    first = play.step(0)
    orders = {rank: play.ask(rank).wait() for rank in (1, 2)}
    # A whole meta-batch each, and not the same one.
    assert orders[1][1].tolist() == list(range(7))
    assert orders[2][1].tolist() == list(range(7, 14))
    answer = play.ask(1, play.computed(orders[1]))
    assert_same(first.result(LIMIT_S), play.expected(orders[1][1]))
    slow = play.computed(orders[2])
    for number in (1, 2):
        step = play.step(number)
        order = answer.wait()
        assert play.server.under_way[1][0] == number
        answer = play.ask(1, play.computed(order))
        step.result(LIMIT_S)
    # Two updates since its model: too old by one.
    fourth = play.step(3)
    fresh = play.ask(2, slow).wait()
    assert play.server.under_way[2][0] == 3
    play.ask(2, play.computed(fresh))
    assert_same(fourth.result(LIMIT_S), play.expected(fresh[1]))
    report = play.server.report()
    assert report["dropped"] == 1
    assert report["staleness"] == [4]


@pytest.mark.parametrize("spared", [0, 1])
def test_fewer_tasks_than_trainers(pool: ThreadPoolExecutor, spared: int) -> None:
    """A trainer without a task gets no order, is not waited for and is no backup worker."""
    values = {"ps_mode": "backup", "ps_backup_workers": spared, "meta_batch_size": 2}
    play = Play(pool, trainers=4, **values)
    step = pool.submit(play.server.meta_step, play.params, torch.arange(2))
    answers = {rank: play.ask(rank) for rank in (1, 2, 3, 4)}
    orders = {rank: answers[rank].wait() for rank in (1, 2)}
    for rank in list(orders)[: 2 - spared]:
        play.ask(rank, play.computed(orders[rank]))
    assert step.result(LIMIT_S).n_tasks == 2 - spared
    assert not answers[3].done()
    assert not answers[4].done()
    survived = []
    for rank in (3, 4, 1, 2):
        survived.append(play.server.survives([rank], "lost"))
        play.server.gone.add(rank)
    assert survived == [True, True, spared > 0, False]


def test_a_step_needs_a_trainer_besides_the_backups(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(UserError, match="--ps-backup-workers 2"):
        Play(pool, trainers=2, ps_mode="backup", ps_backup_workers=2)


@pytest.mark.parametrize(("mode", "step"), [("sync", 0), ("async", 1)])
def test_a_served_model_steps_on_meanwhile(
    pool: ThreadPoolExecutor, mode: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks ordered in one step come in the next: too late, except in async mode."""
    play = Play(pool, 1, ps_mode=mode, ps_forward="remote", network=f"{__name__}:Scaled")
    server = play.server
    server.under_way[1] = 0, (server.compute, IDS, None)
    for server.round in (0, 1):
        params = {name: (1 + server.round) * tensor for name, tensor in play.params.items()}
        server.publish(params)
    totals = server.forward(1, list(play.worker.training_tasks(IDS)))
    totals[0].backward()
    gradients = {server.leaf: server.leaf.grad}
    monkeypatch.setattr("torch.distributed.autograd.get_gradients", lambda context: gradients)
    server.deliver(1, 0)
    play.ask(1)
    assert server.under_way[1][0] == step
    play.params = params
    share = server.arrivals.get(timeout=LIMIT_S).result
    assert_same(server.packing.to_share(share), play.expected(IDS))
