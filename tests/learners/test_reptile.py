"""Reptile against PyTorch's optimizers on the same mini-batches."""

from functools import partial
from typing import Any

import pytest
import torch

from datasets.episodes import shuffled as in_random_order
from datasets.tasks import Task
from maml.config.cli import parse
from maml.errors import UserError
from maml.learners.maml import MAML
from maml.metagradient.by_task import one_by_one
from maml.metagradient.differentiate import differentiate
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.networks.loss import MiniBatches
from maml.params import without_prefix
from tests.compiler import needs_compiler
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12])
PARSED = ("learner", "inner_optimizer", "keep_moment")
MOMENT = "second_moment."
NO_LOSS: Any = None
KEPT = {"inner_optimizer": "adam0", "keep_moment": True}


make_worker = partial(
    worker_of, "reptile-glyphs-5way-1shot", filters=16, inner_steps=5, train_shots=3,
    inner_batch=6, inner_lr=0.01, kernels="torch",
)  # fmt: skip


def descend(optimizer: Any, learner: Any, task: Task, batch: int, steps: int, of: int = 0) -> None:
    """Take plain steps on mini-batches of ``batch``; losses are sums over ``of``, or means."""
    for step in range(steps):
        places = MiniBatches(NO_LOSS, learner.config.seed, batch).places(step, 15)
        optimizer.zero_grad()
        logits, _ = learner.network(task.support_x[places])
        loss = torch.nn.functional.cross_entropy(logits, task.support_y[places], reduction="sum")
        (loss / (of or batch)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.01)),
        ("adam0", lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.999))),
    ],
)
def test_a_step_is_towards_the_adapted_weights(kind: str, make: Any) -> None:
    """θ ← θ + ε mean(φ − θ) (algorithm 2), with a new Adam for each task."""
    worker = make_worker(inner_optimizer=kind)
    config, learner = worker.config, worker.learner
    tasks = worker.training.tasks(IDS)
    assert tasks.support_y.shape == (3, 15)
    params = {name: p.detach().clone() for name, p in learner.meta_parameters().items()}
    ends = []
    for i in range(3):
        task = Task(*(tensor[i] for tensor in tasks))
        for name, p in learner.meta_parameters().items():
            p.data.copy_(params[name])
        descend(make(learner.parameters()), learner, task, batch=6, steps=5)
        ends.append({name: p.detach().clone() for name, p in learner.meta_parameters().items()})
    share = worker.share(params, IDS, learner)
    outer = OuterOptimizer(config, params)
    outer.step(share.gradients, share.n_tasks, config.iterations // 4)
    for name, start in params.items():
        if name.endswith("conv.bias") and kind == "adam0":
            continue  # its gradient is only rounding, which Adam divides by its own size
        mean = torch.stack([end[name] for end in ends]).mean(0)
        expected = start + 0.75 * (mean - start)
        torch.testing.assert_close(outer.params[name], expected, rtol=1e-9, atol=1e-10, msg=name)


def test_a_kept_moment_is_that_of_an_adam_that_lives_on() -> None:
    """One task an iteration at a meta-step of 1: θ = φ, and one Adam takes all tasks' steps."""
    worker = make_worker(**KEPT, iterations=1, eval_inner_batch=3)
    config, learner = worker.config, worker.learner
    params = {name: p.detach().clone() for name, p in learner.meta_parameters().items()}
    optimizer = torch.optim.Adam(learner.network.parameters(), lr=0.01, betas=(0.0, 0.999))
    outer = OuterOptimizer(config, params)
    for i in range(4):
        ids = torch.tensor([i])
        task = Task(*(tensor[0] for tensor in worker.training.tasks(ids)))
        share = worker.share(outer.params, ids, learner)
        outer.step(share.gradients, 1)
        descend(optimizer, learner, task, batch=6, steps=5)
    named = learner.network.named_parameters()
    # Without what has only rounding as its gradient, which Adam divides by its own size.
    theirs = {name: tensor for name, tensor in named if not name.endswith("conv.bias")}
    # At test, the network's steps go on from there and change no parameter.
    adapted = learner.adapted(outer.params, task, 7)
    for name, expected in theirs.items():
        found = outer.params[f"network.{name}"]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-10, msg=name)
        moment = optimizer.state[expected]["exp_avg_sq"]
        found = outer.params[f"second_moment.{name}"]
        torch.testing.assert_close(found, moment, rtol=1e-9, atol=1e-14, msg=name)
    assert float(outer.params["second_moment_weight"]) == pytest.approx(1 - 0.999**20)
    # Released losses are sums: in units of training's means of 6, a sum of 3 is half a mean.
    descend(optimizer, learner, task, batch=3, steps=7, of=6)
    # Adam's ε is not the same share of a sum as of a mean.
    found = {name: adapted[name] for name in theirs}
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


REPTILE = "reptile-omniglot-5way-1shot"


@pytest.mark.parametrize(
    "flags",
    ["--meta-optimizer adam", "--meta-momentum 0.5", "--meta-lr 1.5", "--meta-lr-end 3",
     "--grad-clip 1"],
)  # fmt: skip
def test_a_kept_moment_stays_a_mean_of_squares(flags: str) -> None:
    with pytest.raises(UserError, match=r"--keep-moment: .* or give --no-keep-moment"):
        parse([REPTILE, *flags.split()])
    assert not parse([REPTILE, *flags.split(), "--no-keep-moment"]).keep_moment


def test_what_keeps_no_moment_is_not_asked_about_it() -> None:
    """Another inner optimizer or learner than the preset's."""
    for flags in ("--inner-optimizer sgd", "--learner maml --inner-optimizer adam --grad-clip 10"):
        config = parse([REPTILE, *flags.split()])
        parsed = {name: getattr(config, name) for name in PARSED}
        learner = worker_of(REPTILE, data="glyphs", **parsed).learner
        assert not any("moment" in name for name in learner.meta_parameters())
    with pytest.raises(UserError, match=r"--keep-moment .* --inner-optimizer adam0, not sgd"):
        parse(["reptile-glyphs-5way-1shot", "--keep-moment"])
    with pytest.raises(
        UserError, match=r"--keep-moment .* is not for --learner maml, but for reptile"
    ):
        parse(["maml-glyphs-5way-1shot", "--inner-optimizer", "adam0", "--keep-moment"])


def test_a_moment_that_nothing_moves_is_refused() -> None:
    worker = make_worker(**KEPT)
    params, tasks = worker.learner.meta_parameters(), worker.training.tasks(IDS)
    with pytest.raises(ValueError, match="second_moment: needs displacement=True"):
        differentiate(worker.learner.problem(params, 2), tasks)


@needs_compiler
@pytest.mark.parametrize("kept", [False, True])
def test_kernels_find_the_same(kept: bool) -> None:
    changes = KEPT if kept else {}
    native, plain = (make_worker(kernels=kernels, **changes) for kernels in ("native", "torch"))
    params = plain.learner.meta_parameters()
    for _ in range(kept):  # a moment above zero, also where there is no gradient
        found = plain.share(params, IDS, plain.learner).gradients
        params = {name: p.detach() - found[name] / 3 for name, p in params.items()}
        params |= {name: p + 1e-3 for name, p in params.items() if name.startswith(MOMENT)}
    a, b = (worker.share(params, IDS, worker.learner) for worker in (native, plain))
    torch.testing.assert_close(a.totals, b.totals, rtol=1e-10, atol=1e-10)
    for name, gradient in b.gradients.items():
        if name.startswith(MOMENT) or not name.endswith("conv.bias"):
            torch.testing.assert_close(a.gradients[name], gradient, rtol=1e-9, atol=1e-10)
    tasks = plain.evaluation("test").tasks(IDS)
    tested, expected = (w.learner.evaluate(params, tasks) for w in (native, plain))
    torch.testing.assert_close(tested, expected, rtol=1e-9, atol=1e-9)


def test_a_step_sees_other_labels_in_another_task() -> None:
    """With one order for all tasks, the weights would learn which labels come last."""
    worker = make_worker()
    plain = MAML.open_tasks(worker.learner, "train").tasks(IDS)
    shuffled = worker.training.tasks(IDS)
    assert torch.equal(worker.training.tasks(IDS[1:2]).support_x, shuffled.support_x[1:2])
    assert len({tuple(labels.tolist()) for labels in shuffled.support_y}) == len(IDS)
    assert torch.equal(shuffled.query_x, plain.query_x)
    for task in range(len(IDS)):
        at = [
            int((plain.support_x[task] == image).flatten(1).all(1).nonzero())
            for image in shuffled.support_x[task]
        ]
        assert sorted(at) == list(range(15))
        assert torch.equal(shuffled.support_y[task], plain.support_y[task][at])
    listed = worker.training.remade(lambda _: list(one_by_one(plain)))  # as a user's own data may
    found: Any = in_random_order(listed, worker.config.seed).tasks(IDS)
    assert torch.equal(torch.cat([task.support_x for task in found]), shuffled.support_x)


def test_mini_batches_go_through_the_set() -> None:
    """Three of seven examples a step: each is seen once a pass, in another order each time."""
    batches = MiniBatches(NO_LOSS, 0, 3)
    places = torch.cat([batches.places(step, 7) for step in range(7)])
    passes = places.view(3, 7)
    assert all(sorted(one.tolist()) == list(range(7)) for one in passes)
    assert len({tuple(one.tolist()) for one in passes}) == 3
    assert not torch.equal(MiniBatches(NO_LOSS, 1, 3).places(0, 7), batches.places(0, 7))
    assert sorted(batches.places(4, 2).tolist()) == [0, 1]


def test_a_support_loss_of_one_s_own_sees_the_mini_batch() -> None:
    worker = make_worker()
    seen = []

    class Mine(type(worker.learner)):  # type: ignore[misc]
        def support_loss(self, params: Any, task: Task, step: int) -> Any:
            seen.append(task.support_y.shape[-1])
            return super().support_loss(params, task, step)

    mine = Mine(worker.config)
    params = worker.learner.meta_parameters()
    found = worker.share(params, IDS, mine).gradients
    expected = worker.share(params, IDS, worker.learner).gradients
    assert set(seen) <= {6, 15} and 6 in seen  # 15: the loss is tried once on a whole task
    for name, gradient in expected.items():
        if not name.endswith("conv.bias"):
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-10)


def test_a_kept_moment_of_a_regression_is_scaled_by_points() -> None:
    """Its targets are no classes: of ten points, a mini-batch has five."""
    learner = worker_of(
        "maml-sinusoid-10shot", learner="reptile", inner_batch=5, inner_optimizer="adam0",
        keep_moment=True,
    ).learner  # fmt: skip
    params = learner.meta_parameters()
    params = {n: p + 1 if n.startswith(MOMENT) else p for n, p in params.items()}
    moment = learner.problem(params, 2).second_moment
    assert moment is not None
    expected = {n: p * (5 / 10) ** 2 for n, p in without_prefix(params, MOMENT).items()}
    torch.testing.assert_close(moment.total, expected)
