"""MAML's own flags, against a plain loop."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maml.errors import UserError
from maml.metagradient.problem import Problem
from tests.compiler import needs_compiler
from tests.metagradient.peer import by_hand, losses_of
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12])


make_worker = partial(worker_of, "maml-glyphs-5way-1shot", filters=8, inner_steps=2, inner_lr=0.1)


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
    worker = make_worker(learner=learner, label_smoothing=0.3, **way)
    own = worker.learner
    params = own.meta_parameters()
    weights = own.network_weights(params)
    adapts = {"maml": "", "anil": "head", "boil": "blocks"}[learner]
    start = {name: p for name, p in weights.items() if name.startswith(adapts)}
    problem = Problem(
        start, **losses_of(lambda at, x, _: own.call_network(at, x)[0], smoothed),
        fixed={name: p for name, p in weights.items() if name not in start}, lr=0.1, steps=2,
    )  # fmt: skip
    expected = by_hand(problem, worker.training.tasks(IDS))
    found = worker.share(params, IDS, own)
    assert found.totals[0].item() == pytest.approx(expected.losses.sum().item(), rel=1e-12)
    gradients = expected.gradients.start | expected.gradients.fixed
    wanted = {f"network.{name}": gradient for name, gradient in gradients.items()}
    torch.testing.assert_close(found.gradients, wanted, rtol=1e-9, atol=1e-10)


def test_scores_are_not_smoothed() -> None:
    """Scores are equal with and without the flag; losses of a learner built on MAML are not."""
    plain, own = (make_worker(learner="metasgd", label_smoothing=value) for value in (0.0, 0.3))
    params, tasks = plain.learner.meta_parameters(), plain.evaluation("test").tasks(IDS)
    answers = plain.learner.predictions(params, tasks, 0)
    scores = [worker.learner.scores(answers, tasks.query_y) for worker in (plain, own)]
    assert all(torch.equal(scores[0][name], scores[1][name]) for name in scores[0])
    losses = [worker.share(params, IDS, worker.learner).totals[0] for worker in (plain, own)]
    assert (losses[0] - losses[1]).abs() > 1e-3


def test_smoothing_without_a_meaning_is_refused() -> None:
    with pytest.raises(UserError, match=r"--label-smoothing 0.1: needs the cross-entropy of cl"):
        worker_of("maml-sinusoid-10shot", label_smoothing=0.1)
