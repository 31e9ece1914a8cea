"""The baselines: a classifier whose features serve new classes, and no adaptation at all."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.errors import DataError
from datasets.tasks import Task
from maml.learners.finetune import Finetune
from maml.networks.statistics import Statistics
from maml.params import Params
from tests.runs import worker_of

IDS = torch.tensor([3, 11])


make_worker = partial(worker_of, "finetune-glyphs-5way-1shot", filters=8, shots=2)


def test_it_learns_the_training_classes() -> None:
    """The loss is a mini-batch's mean cross-entropy over all classes; no task has a support set."""
    worker = make_worker(batch_size=30)
    learner, ways = worker.learner, worker.config.train_ways
    assert isinstance(learner, Finetune) and ways is not None
    tasks = worker.training.tasks(IDS)
    assert tasks.query_y.shape == (2, 30) and tasks.support_y.shape == (2, 0)
    every = worker.training.tasks(torch.arange(worker.training.one_pass or 0)).query_y
    assert every.unique().numel() == ways  # of all classes, in one pass
    found = worker.share(learner.meta_parameters(), IDS, learner)
    loss = sum(
        F.cross_entropy(learner.network(x)[0], y)
        for x, y in zip(tasks.query_x, tasks.query_y, strict=True)
    )
    params = learner.meta_parameters()
    for name, wanted in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
        torch.testing.assert_close(found.gradients[name], wanted, rtol=1e-9, atol=1e-10)
    with pytest.raises(DataError, match=r"--train-ways 7: the train split .* give --train-ways"):
        make_worker(train_ways=7)


def test_a_network_that_is_called_otherwise_is_tested_so() -> None:
    """A subclass prepares its inputs: here they are constant, so all queries have equal outputs."""

    class Dark(Finetune):
        def call_network(
            self, params: Params, x: Tensor, statistics: Statistics | None = None
        ) -> tuple[Tensor, Statistics]:
            return super().call_network(params, 0 * x, statistics)

    worker = make_worker(eval_inner_steps=2)
    learner, tasks = Dark(worker.config), worker.evaluation("test").tasks(IDS)
    answers = learner.predictions(learner.meta_parameters(), tasks, 2)
    for outputs in answers:
        torch.testing.assert_close(outputs, outputs[:, :1].expand_as(outputs))


@pytest.mark.parametrize("steps", [0, 3])
def test_new_classes_by_centroid_or_by_a_tuned_head(steps: int) -> None:
    """Both use the features that the classifier's last layer reads."""
    worker = make_worker(inner_lr=0.5, eval_inner_steps=steps)
    learner = worker.learner
    assert isinstance(learner, Finetune)
    tasks = worker.evaluation("test").tasks(IDS)
    answers = learner.predictions(learner.meta_parameters(), tasks, steps)
    task = Task(*(tensor[1] for tensor in tasks))
    with torch.no_grad():
        weights = dict(learner.network.named_parameters())
        support, statistics = learner.features_of(weights, task.support_x)
        query, _ = learner.features_of(weights, task.query_x, statistics)
    if steps:
        head = torch.nn.Linear(support.shape[1], 5, dtype=torch.float64)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(head(support), task.support_y).backward()
            optimizer.step()
        wanted = head(query).detach()
    else:
        means = torch.stack([support[task.support_y == label].mean(0) for label in range(5)])
        wanted = -torch.cdist(query, means).square()
    torch.testing.assert_close(answers.non_transductive[1], wanted, rtol=1e-8, atol=1e-8)


def test_without_adaptation_the_support_set_has_no_say() -> None:
    worker = worker_of("noadapt-glyphs-5way-1shot", filters=8)
    params = worker.learner.meta_parameters()
    tasks = worker.evaluation("test").tasks(IDS)
    answers = worker.learner.predictions(params, tasks, 5).transductive
    for x, found in zip(tasks.query_x, answers, strict=True):
        torch.testing.assert_close(found, worker.learner.network(x)[0].detach())
