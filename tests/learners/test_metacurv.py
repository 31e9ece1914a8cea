"""Meta-Curvature against learn2learn's transforms, plain autograd, and MAML."""

import pytest
import torch

from datasets.tasks import Task
from maml.learners.metacurv import curved
from maml.params import without_prefix
from maml.worker import Worker
from tests.metagradient.peer import oracle
from tests.workers import moved, worker_of

IDS = torch.tensor([3, 11, 12])


def make_worker(preset: str = "maml-glyphs-5way-1shot", **changes: object) -> Worker:
    values = {
        "learner": "metacurv", "filters": 16, "inner_steps": 2,
        "inner_lr": 0.1, **changes,
    }  # fmt: skip
    return worker_of(preset, **values)


def test_transforms_as_learn2learn_does() -> None:
    """A convolution, a matrix and a vector; its names of the axes are other ones."""
    worker = make_worker()
    matrices = without_prefix(moved(worker), "curvature.")
    generator = torch.Generator().manual_seed(1)
    for name in ("blocks.1.conv.weight", "head.weight", "head.bias"):
        weight = worker.learner.network.get_parameter(name)
        gradient = torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
        own = {key: value for key, value in matrices.items() if key.startswith(name)}
        peer = oracle("MetaCurvatureTransform", "optim.transforms")(weight).double()
        if weight.dim() == 1:
            peer.mc.data.copy_(own[f"{name}.each"])
        else:
            # It multiplies by the second matrix from the right.
            peer.mc_in.data.copy_(own[f"{name}.out"])
            peer.mc_out.data.copy_(own[f"{name}.in"].T)
        if weight.dim() == 4:
            peer.mc_f.data.copy_(own[f"{name}.kernel"])
        found = curved({name: gradient}, own)[name]
        torch.testing.assert_close(found, peer(gradient).detach(), rtol=1e-12, atol=1e-12)


def test_untrained_it_is_maml() -> None:
    worker, maml = make_worker(), make_worker(learner="maml")
    params = worker.learner.meta_parameters()
    found = worker.share(params, IDS, worker.learner).gradients
    expected = maml.share(maml.learner.meta_parameters(), IDS, maml.learner).gradients
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("order", ["second", "first"])
def test_equals_a_walk_by_hand(order: str) -> None:
    worker = make_worker("maml-sinusoid-10shot", order=order, meta_gradient="mixed")
    params = moved(worker)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    matrices = without_prefix(leaves, "curvature.")
    tasks = worker.training.tasks(IDS)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(IDS)):
        task = Task(*(tensor[i] for tensor in tasks))
        at = without_prefix(leaves, "network.")
        for _ in range(2):
            loss, _ = worker.learner.set_loss(at, task.support_x, task.support_y)
            by = torch.autograd.grad(loss, list(at.values()), create_graph=order == "second")
            stepped = curved(dict(zip(at, by, strict=True)), matrices)
            at = {name: tensor - 0.1 * stepped[name] for name, tensor in at.items()}
        total = total + worker.learner.set_loss(at, task.query_x, task.query_y)[0]
    expected = torch.autograd.grad(total, list(leaves.values()))
    found = worker.share(params, IDS, worker.learner).gradients
    for (name, gradient), wanted in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10, msg=name)
