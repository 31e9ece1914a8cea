"""Meta-Curvature against learn2learn's transforms, plain autograd, and MAML."""

from functools import partial

import pytest
import torch

from maml.learners.maml import curved
from maml.metagradient.problem import Problem, Transform
from maml.params import without_prefix
from tests.metagradient.peer import by_hand, losses_of, oracle
from tests.runs import moved, worker_of

IDS = torch.tensor([3, 11, 12])


make_worker = partial(worker_of, learner="metacurv", filters=16, inner_steps=2, inner_lr=0.1)


def test_transforms_as_learn2learn_does() -> None:
    """A convolution, a matrix and a vector; learn2learn names the axes otherwise."""
    worker = make_worker("maml-glyphs-5way-1shot")
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
            # learn2learn multiplies by the second matrix from the right.
            peer.mc_in.data.copy_(own[f"{name}.out"])
            peer.mc_out.data.copy_(own[f"{name}.in"].T)
        if weight.dim() == 4:
            peer.mc_f.data.copy_(own[f"{name}.kernel"])
        found = curved({name: gradient}, own)[name]
        torch.testing.assert_close(found, peer(gradient).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["second", "first"])
def test_equals_a_walk_by_hand(order: str) -> None:
    worker = make_worker("maml-sinusoid-10shot", order=order, meta_gradient="mixed")
    params = moved(worker)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    problem = Problem(
        without_prefix(leaves, "network."),
        **losses_of(lambda at, x, _: worker.learner.call_network(at, x)[0], worker.learner.loss),
        transform=Transform(curved, without_prefix(leaves, "curvature.")),
        lr=0.1, steps=2, order=order,
    )  # fmt: skip
    by_task = by_hand(problem, worker.training.tasks(IDS)).gradients
    expected = problem.tensors().pull_back(by_task, leaves)
    found = worker.share(params, IDS, worker.learner).gradients
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
