"""The supervised learner against plain PyTorch: a module in train mode and autograd."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from datasets.tasks import Task
from maml.learners.objectives import RANKED_CLASSIFICATION
from tests.runs import worker_of

IDS = torch.tensor([3, 0, 11])


make_worker = partial(worker_of, "supervised-glyphs-lenet", ways=6, batch_size=8, task_batch=2)


def test_gradient_is_plain_pytorch_s() -> None:
    """Two mini-batches, each with its own batch statistics."""
    worker = make_worker(network="resnet18", batch_size=4)
    share = worker.share(worker.learner.meta_parameters(), IDS[:2], worker.learner)
    peer: Any = torchvision.models.resnet18(num_classes=6)
    # The small stem of one channel.
    peer.conv1, peer.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()
    ours: Any = worker.learner.network.module
    missing = peer.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all("running" in key or "num_batches" in key for key in missing.missing_keys)
    peer.double().train()
    tasks = worker.training.tasks(IDS[:2])
    losses, right = 0.0, 0.0
    for x, y in zip(tasks.query_x, tasks.query_y, strict=True):
        logits = peer(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        losses += loss.item()
        right += (logits.argmax(1) == y).double().mean().item()
    assert share.n_tasks == 2
    assert share.totals[0].item() == pytest.approx(losses, rel=1e-12)
    assert share.totals[1].item() == pytest.approx(right, rel=1e-12)
    for found, parameter in zip(share.gradients.values(), peer.parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-4
        torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-10)


def test_precision_at_five_by_sorting() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 9, generator=generator, dtype=torch.float64)
    labels = torch.randint(9, (40,), generator=generator)
    found = RANKED_CLASSIFICATION.metrics(logits, labels)
    assert tuple(found) == RANKED_CLASSIFICATION.names == ("accuracy", "precision@1", "precision@5")
    rows = [sorted(range(9), key=lambda c: -row[c]) for row in logits.tolist()]
    for name, k in (("accuracy", 1), ("precision@1", 1), ("precision@5", 5)):
        right = sum(int(label) in row[:k] for row, label in zip(rows, labels, strict=True))
        assert found[name].item() == pytest.approx(right / 40, rel=1e-12)


def test_evaluation_normalises_by_training_examples_or_by_the_batch_itself() -> None:
    worker = make_worker(network="conv4", filters=8)
    params = {k: v.detach() for k, v in worker.learner.meta_parameters().items()}
    names = worker.evaluation_names
    row = worker.evaluate(params, "test", torch.arange(1))[0]
    found = dict(zip(names, row.tolist(), strict=True))
    task = Task(*(part[0] for part in worker.evaluation("test").tasks(torch.arange(1))))
    weights = worker.learner.network_weights(params)

    def losses(x: Tensor, y: Tensor, given: Any) -> float:
        logits, _ = worker.learner.call_network(weights, x, given)
        return F.cross_entropy(logits, y).item()

    _, of_training = worker.learner.call_network(weights, task.support_x)
    assert found["loss"] == pytest.approx(losses(task.query_x, task.query_y, None), rel=1e-10)
    alone = [
        losses(task.query_x[i : i + 1], task.query_y[i : i + 1], of_training) for i in range(8)
    ]
    assert found["non_transductive_loss"] == pytest.approx(sum(alone) / 8, rel=1e-10)
    assert found["non_transductive_loss"] != found["loss"]
