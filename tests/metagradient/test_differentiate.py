"""The meta-gradient against oracles: a closed form, and another library."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.tasks import Task
from maml.learners.maml import MAML
from maml.metagradient.problem import Problem
from maml.metagradient.rules import OPTIMIZERS
from maml.metagradient.unrolled import outer_loss
from maml.params import Params
from maml.worker import Worker
from tests.metagradient.peer import losses_of, oracle, randn
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])


def make_worker(preset: str, **changes: object) -> Worker:
    return worker_of(preset, **{"task_batch": 3, "inner_steps": 3, **changes})


@pytest.mark.parametrize("order", ["second", "first"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closed_form_of_linear_regression(steps: int, order: str) -> None:
    """Mean squared error of X w: every derivative is a product of known matrices."""
    task = Task(*(randn(*shape, seed=i) for i, shape in enumerate([(6, 4), (6,), (8, 4), (8,)])))
    x, y, x_query, y_query = task
    w, rate = randn(4, seed=4), 0.05

    def outer(params: Params) -> Tensor:
        losses = losses_of(lambda at, x, _: x @ at["w"], F.mse_loss)
        return outer_loss(Problem(params, **losses, lr=rate, steps=steps, order=order), task)[0]

    gradient = torch.func.grad(outer)({"w": w})["w"]

    hessian = 2 / 6 * x.T @ x
    adapted = w.clone()
    jacobian = torch.eye(4, dtype=torch.float64)
    for _ in range(steps):
        adapted = adapted - rate * (2 / 6 * x.T @ (x @ adapted - y))
        if order == "second":
            jacobian = (torch.eye(4, dtype=torch.float64) - rate * hessian) @ jacobian
    expected = jacobian.T @ (2 / 8 * x_query.T @ (x_query @ adapted - y_query))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("MAML", "maml-glyphs-5way-1shot"),
        ("MAML", "maml-sinusoid-10shot"),
        ("MetaSGD", "maml-glyphs-5way-1shot"),
    ],
)
def test_equals_learn2learn(kind: str, preset: str, first_order: bool) -> None:
    """The same gradient in weights, and in Meta-SGD's rates; learn2learn walks task by task."""
    order = "first" if first_order else "second"
    worker = make_worker(preset, learner=kind.lower(), order=order, inner_lr=0.1)
    params = worker.learner.meta_parameters()
    share = worker.share(params, IDS, worker.learner)

    peer = oracle(kind)(worker.learner.network, lr=0.1, first_order=first_order)
    loss = worker.learner.objective.loss
    for support_x, support_y, query_x, query_y in zip(*worker.training.tasks(IDS), strict=True):
        clone = peer.clone()
        for _ in range(3):
            clone.adapt(loss(clone(support_x)[0], support_y))
        loss(clone(query_x)[0], query_y).backward()
    for found, parameter in zip(share.gradients.values(), peer.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "order"), [*((name, "second") for name in sorted(OPTIMIZERS)), ("adam", "first")]
)
def test_every_inner_optimizer_batches_over_tasks(name: str, order: str) -> None:
    """A batch of tasks gives the finite sum of what each gives alone.

    Some units are off for a whole support set, so their gradient is exactly zero.
    """
    changes = {"inner_optimizer": name, "inner_lr": 0.01, "inner_steps": 8, "order": order}
    worker = make_worker("maml-sinusoid-10shot", task_batch=5, **changes)
    params = worker.learner.meta_parameters()
    together = worker.share(params, IDS, worker.learner)
    alone = [worker.share(params, i[None], worker.learner) for i in IDS]
    for key, gradient in together.gradients.items():
        total = sum(share.gradients[key] for share in alone)
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, total, rtol=1e-9, atol=1e-10)


def test_a_loss_that_draws_only_later_is_computed_task_by_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [make_worker("maml-sinusoid-10shot", batching=way) for way in ("vmap", "tasks")]
    monkeypatch.setattr(
        MAML, "modulated", lambda _, params: {n: F.dropout(p) for n, p in params.items()}
    )
    shares = [w.share(w.learner.meta_parameters(), IDS, w.learner) for w in workers]
    assert torch.equal(shares[0].totals, shares[1].totals)


def test_any_ids_are_summed_as_they_stand() -> None:
    worker = make_worker("maml-sinusoid-10shot")
    params = worker.learner.meta_parameters()
    once = worker.share(params, torch.tensor([4]), worker.learner)
    twice = worker.share(params, torch.tensor([4, 9, 4])[::2], worker.learner)
    none = worker.share(params, IDS[:0], worker.learner)
    assert (twice.n_tasks, none.n_tasks) == (2, 0) and not none.totals.any()
    for key, gradient in twice.gradients.items():
        torch.testing.assert_close(gradient, 2 * once.gradients[key], rtol=1e-12, atol=1e-13)
        assert not none.gradients[key].any()
