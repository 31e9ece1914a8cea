"""MAML's own flags, against a plain loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.tasks import Task
from maml.config.cli import parse
from maml.errors import UserError
from maml.learners import build_learner
from maml.params import Params
from maml.worker import Worker
from tests.compiler import needs_compiler
from tests.workers import worker_of

IDS = torch.tensor([3, 11, 12])


def make_worker(learner: str, **changes: object) -> Worker:
    values = {"learner": learner, "filters": 8, "inner_steps": 2, "inner_lr": 0.1, **changes}
    return worker_of("maml-glyphs-5way-1shot", **values)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Three tenths of each label shared out among five classes."""
    targets = 0.7 * F.one_hot(labels, 5).double() + 0.3 / 5
    return -(targets * logits.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("learner", ["maml", "anil", "boil"])
@pytest.mark.parametrize(
    "way",
    [
        {"kernels": "torch", "meta_gradient": "reverse"},
        {"kernels": "torch", "meta_gradient": "mixed"},
        pytest.param({"kernels": "native"}, marks=needs_compiler),
    ],
    ids=str,
)
def test_smoothed_labels_equal_a_plain_loop(learner: str, way: dict[str, object]) -> None:
    worker = make_worker(learner, label_smoothing=0.3, **way)
    own = worker.learner
    params = own.meta_parameters()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    total = torch.zeros((), dtype=torch.float64)
    for parts in zip(*worker.training.tasks(IDS), strict=True):
        task, at = Task(*parts), own.network_weights(leaves)
        for _ in range(2):
            loss = smoothed(own.call_network(at, task.support_x)[0], task.support_y)
            moving = {n: p for n, p in at.items() if n.startswith("head") != (learner == "boil")}
            moving = at if learner == "maml" else moving
            by = torch.autograd.grad(loss, list(moving.values()), create_graph=True)
            at = at | {n: p - 0.1 * g for (n, p), g in zip(moving.items(), by, strict=True)}
        total = total + smoothed(own.call_network(at, task.query_x)[0], task.query_y)
    gradients = torch.autograd.grad(total, list(leaves.values()))
    expected: Params = dict(zip(leaves, gradients, strict=True))
    found = worker.share(params, IDS, own)
    assert found.totals[0].item() == pytest.approx(total.item(), rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=name)


def test_scores_are_not_smoothed() -> None:
    """Nor a learner's that does not read the flag; one that is built on MAML does."""
    plain, own = (make_worker("metasgd", label_smoothing=value) for value in (0.0, 0.3))
    params, tasks = plain.learner.meta_parameters(), plain.evaluation("test").tasks(IDS)
    answers = plain.learner.predictions(params, tasks, 0)
    scores = [worker.learner.scores(answers, tasks.query_y) for worker in (plain, own)]
    assert all(torch.equal(scores[0][name], scores[1][name]) for name in scores[0])
    losses = [worker.share(params, IDS, worker.learner).totals[0] for worker in (plain, own)]
    assert (losses[0] - losses[1]).abs() > 1e-3


def test_smoothing_without_a_meaning_is_refused() -> None:
    for preset, says in {
        "maml-sinusoid-10shot": "--label-smoothing 0.1: is for the cross-entropy of classes",
        "protonet-glyphs-5way-1shot": "--label-smoothing 0.1 is not for --learner protonet",
    }.items():
        with pytest.raises(UserError, match=says):
            build_learner(parse([preset, "--label-smoothing", "0.1"]))
