"""The meta-gradient against another library's, and of any tasks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from maml.learners.maml import MAML
from tests.metagradient.peer import oracle
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])


make_worker = partial(worker_of, task_batch=3, inner_steps=3)


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
