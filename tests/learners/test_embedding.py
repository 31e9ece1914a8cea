"""Learners with a classifier in closed form on a network's features: ProtoNet and R2D2."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maml.errors import UserError
from maml.learners.embedding import Embedding
from tests.compiler import needs_compiler
from tests.metagradient.peer import oracle
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12])


make_worker = partial(worker_of, "protonet-glyphs-5way-1shot", filters=8, shots=2)


def some_features(learner: Embedding) -> tuple[Tensor, Tensor, Tensor]:
    """Support features, their labels in no order, and query features, of three classes."""
    generator = torch.Generator().manual_seed(1)
    support, query = (
        torch.randn(n, learner.n_features, dtype=torch.float64, generator=generator) for n in (7, 4)
    )
    return support, torch.tensor([0, 2, 1, 1, 0, 2, 2]), query


def test_protonet_is_learn2learn_s() -> None:
    """It is also a linear classifier: logits 2 c·f − ‖c‖² + a constant (paper, section 2.4)."""
    learner = make_worker().learner
    assert isinstance(learner, Embedding)
    support, labels, query = some_features(learner)
    found = learner.logits({}, support, F.one_hot(labels).double(), query)
    peer = oracle("PrototypicalClassifier", "nn")(support, labels)
    torch.testing.assert_close(found, peer(query), rtol=1e-12, atol=1e-12)
    means = torch.stack([support[labels == label].mean(0) for label in range(3)])
    linear = F.linear(query, 2 * means, -means.square().sum(1))
    torch.testing.assert_close(found.softmax(1), linear.softmax(1), rtol=1e-10, atol=1e-12)


def test_r2d2_minimises_the_ridge_loss() -> None:
    """The gradient of mean ‖x W + b − y‖² + λ ‖(W, b)‖² is zero at the solution."""
    learner = make_worker(learner="r2d2").learner
    assert isinstance(learner, Embedding)
    support, labels, query = some_features(learner)
    y, log_lambda, alpha = F.one_hot(labels).double(), torch.tensor(-1.3).double(), 2.5
    params = {"log_lambda": log_lambda, "log_alpha": torch.tensor(alpha).double().log()}
    x, x_query = (F.pad(t, (0, 1), value=1.0) for t in (support, query))
    # The paper's other form: as many unknowns as features (equation 3).
    eye = torch.eye(x.shape[1], dtype=torch.float64)
    w = torch.linalg.solve(x.T @ x / len(x) + log_lambda.exp() * eye, x.T @ y / len(x))
    w.requires_grad_()
    ridge = (x @ w - y).square().sum() / len(x) + log_lambda.exp() * w.square().sum()
    (slope,) = torch.autograd.grad(ridge, w)
    assert slope.abs().max() < 1e-12
    found = learner.logits(params, support, y, query)
    torch.testing.assert_close(found, alpha * x_query @ w.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("learner", ["protonet", "r2d2"])
def test_gradient_and_answers_by_hand(learner: str, kernels: str) -> None:
    """Train at other ways and shots, both sets in one batch; check each answer's statistics."""
    episodes = {"train_ways": 7, "train_shots": 1, "queries": 2, "eval_queries": 3}
    worker = make_worker(learner=learner, kernels=kernels, **episodes)
    own = worker.learner
    assert isinstance(own, Embedding)
    own.prepare(torch.device("cpu"))  # refuses what kernels do not serve
    tasks = worker.training.tasks(IDS)
    assert tasks.support_y.shape == (3, 7) and tasks.query_y.shape == (3, 14)
    params = own.meta_parameters()
    extra = {n: p for n, p in params.items() if not n.startswith("network.")}
    assert not any("head" in name for name in params)
    total = torch.zeros((), dtype=torch.float64)
    for support_x, support_y, query_x, query_y in zip(*tasks, strict=True):
        features, _ = own.network(torch.cat([support_x, query_x]))
        one_hot = F.one_hot(support_y).double()
        logits = own.logits(extra, features[:7], one_hot, features[7:])
        total = total + F.cross_entropy(logits, query_y)
    expected = torch.autograd.grad(total, list(params.values()))
    found = worker.share(params, IDS, own)
    torch.testing.assert_close(found.totals[0], total.detach(), rtol=1e-11, atol=0)
    gradients = tuple(found.gradients.values())
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-10)

    test = worker.evaluation("test").tasks(IDS)
    assert test.support_y.shape == (3, 10) and test.query_y.shape == (3, 15)
    answers = own.predictions(params, test, 0)
    one_hot = F.one_hot(test.support_y[1]).double()
    with torch.no_grad():
        features, _ = own.network(torch.cat([test.support_x[1], test.query_x[1]]))
        support, statistics = own.network(test.support_x[1])
        query, _ = own.network(test.query_x[1], statistics)
        together = own.logits(extra, features[:10], one_hot, features[10:])
        alone = own.logits(extra, support, one_hot, query)
    torch.testing.assert_close(answers.transductive[1], together)
    torch.testing.assert_close(answers.non_transductive[1], alone)


class Headless(nn.Module):
    """A network that does not name its output layer."""

    head_prefix: str | None = None

    def __init__(self, image_shape: tuple[int, int, int], ways: int) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 3 * ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def test_what_has_no_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line = r'--network .*:Headless does not say which its output .*, or "" if its outputs are fea'
    with pytest.raises(UserError, match=line):
        make_worker(network=f"{__name__}:Headless")
    monkeypatch.setattr(Headless, "head_prefix", "")
    network = make_worker(network=f"{__name__}:Headless").learner.network
    assert any(isinstance(layer, nn.Linear) for layer in network.modules())
    with pytest.raises(UserError, match="--data sinusoid: its targets are no classes"):
        worker_of("maml-sinusoid-10shot", learner="r2d2")
