"""The blocks of a `Conv4` are one operation, which torch differentiates like any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets.tasks import Task
from maml.kernels.convnet import ConvNet, Shape
from maml.learners.maml import MAML
from maml.metagradient.plan import Plan
from maml.metagradient.problem import Problem
from maml.networks.conv4 import Conv4
from maml.networks.stack import Stack, features, stack_of
from maml.networks.tasks import of_each_task
from maml.params import Params, without_prefix
from tests.compiler import needs_compiler
from tests.metagradient.peer import by_hand
from tests.runs import worker_of

pytestmark = needs_compiler

F64 = torch.float64
N_TASKS = 3
STACKS = {
    "mean": Shape((1, 28, 28), 16, 4, False, True, 1e-3, 0.0),
    "odd flat": Shape((2, 19, 23), 8, 4, False, False, 1e-3, 0.1),
    "odd pooling": Shape((3, 37, 21), 16, 4, True, False, 1e-3, 0.01),
}


def case(shape: Shape, per_task: Callable[[int], bool]) -> tuple[list[Tensor], Tensor]:
    """Return weights, of each task or shared, some scales negative or zero; and tasks' images."""
    torch.manual_seed(3)
    channels, f = shape.image[0], shape.filters
    weights: list[Tensor] = []
    for i in range(4):
        for size in ((f, f if i else channels, 3, 3), (f,), (f,), (f,)):
            n = [N_TASKS] if per_task(len(weights)) else []
            weights.append(0.5 * torch.randn(*n, *size, dtype=F64))
        weights[-2][..., ::3] *= -1
        weights[-2][..., 1] = 0
    return [w.requires_grad_() for w in weights], torch.rand(N_TASKS, 5, *shape.image, dtype=F64)


def by_torch(stack: Stack, x: Tensor, given: Tensor | None, weights: list[Tensor]) -> Any:
    """Return what `features` returns, of one set ``[E, …]`` or of each task's."""
    return of_each_task(stack.plain, (4, 3, *stack.ranks))(x, given, *weights)


def assert_equal(found: Any, wanted: Any) -> None:
    """1e-10, relative to the largest element where that is large."""
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * scale)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the compiled passes that were called."""
    names: list[str] = []
    call = ConvNet._call

    def counted(self: ConvNet, name: str, *arguments: Any) -> Any:
        names.append(name)
        return call(self, name, *arguments)

    monkeypatch.setattr(ConvNet, "_call", counted)
    return names


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("mean", lambda i: False),
        ("odd flat", lambda i: True),
        ("odd pooling", lambda i: False),
        ("odd pooling", lambda i: i % 3 == 0),
    ],
)
def test_value_and_two_derivatives(
    name: str, whose: Callable[[int], bool], passes: list[str]
) -> None:
    stack = stack_of(STACKS[name])
    weights, x = case(STACKS[name], whose)
    vectors = [torch.randn_like(w) for w in weights]
    results = []
    for function in (features, by_torch):
        found, used = function(stack, x, None, weights)
        torch.manual_seed(4)
        cotangent = torch.randn(found.shape, dtype=F64).requires_grad_()
        gradient = torch.autograd.grad(found, weights, cotangent, create_graph=True)
        second = torch.autograd.grad(
            [(found**3).sum(), *gradient], [cotangent, *weights], [None, *vectors],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        results.append((found, used, *gradient, *second))
    assert_equal(*results)
    assert passes == ["features", "pull_back", "along", "pull_back"]


@pytest.mark.parametrize("of_tasks", [True, False])
def test_what_kernels_do_not_differentiate(of_tasks: bool, passes: list[str]) -> None:
    """Gradients by images and statistics, through the statistics used, and third derivatives."""
    stack = stack_of(STACKS["odd pooling"])
    weights, x = case(STACKS["odd pooling"], lambda i: of_tasks)
    given = torch.rand(N_TASKS, 4, 2, 16, dtype=F64) + 0.5
    if not of_tasks:
        x, given = x[0], given[0]
    x, given = x.requires_grad_(), given.requires_grad_()
    results = []
    for function in (features, by_torch):
        found, used = function(stack, x, given, weights)
        by_given = torch.autograd.grad(found.square().sum() + used.sum(), [x, given, *weights])
        found, used = function(stack, x, None, weights)
        value = found.square().sum() + used.square().sum()
        first = torch.autograd.grad(value, weights, create_graph=True)
        value = torch.stack([slope.square().sum() for slope in first]).sum()
        second = torch.autograd.grad(value, weights, create_graph=True)
        value = torch.stack([slope.sum() for slope in second]).sum()
        results.append((*by_given, *first, *second, *torch.autograd.grad(value, [x, *weights])))
    assert_equal(*results)
    assert passes == ["outputs", "features"]


def test_within_transforms_of_torch() -> None:
    """A gradient of a gradient, of each task and of sets of tasks; a Jacobian."""
    stack = stack_of(STACKS["odd flat"])
    weights, x = case(STACKS["odd flat"], lambda i: False)
    weights = [w.detach() for w in weights]
    sets = torch.stack([x, 1 - x])

    def stepped(function: Any) -> Any:
        def loss(weights: list[Tensor], x: Tensor) -> Tensor:
            found: Tensor = function(stack, x, None, weights)[0]
            return found.square().mean().sqrt()

        def after(weights: list[Tensor], x: Tensor) -> Tensor:
            slopes = torch.func.grad(loss)(weights, x)
            moved = [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)]
            return loss(moved, x)

        one = torch.func.grad(after)
        each = torch.func.vmap(one, in_dims=(None, 0))
        return torch.func.vmap(each, in_dims=(None, 0))(weights, sets)

    def jacobian(function: Any) -> Any:
        summed = torch.func.jacrev(lambda weights: function(stack, x[0], None, weights)[0].sum(0))
        return summed(weights)

    assert_equal(stepped(features), stepped(by_torch))
    assert_equal(jacobian(features), jacobian(by_torch))


class Auxiliary(MAML):
    """Smoothed labels; a query loss with another term, by statistics of the support set."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, label_smoothing=0.1)

    def query_loss(self, params: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        loss, outputs = super().query_loss(params, task, step)
        _, statistics = self.call_network(params, task.support_x)
        apart, _ = self.call_network(params, task.query_x, statistics)
        return loss + 0.3 * apart.square().mean(), outputs


@pytest.mark.parametrize(("way", "batching"), [("reverse", "vmap"), ("mixed", "tasks")])
def test_a_learner_with_a_loss_of_its_own(way: str, batching: Any, passes: list[str]) -> None:
    changes: dict[str, Any] = {"filters": 16, "inner_steps": 2, "inner_lr": 0.1}
    config = worker_of("maml-glyphs-5way-1shot", meta_gradient=way, **changes).config
    learner = Auxiliary(config)
    learner.plan = Plan(batching, shares=False)
    assert learner.obstacle(torch.device("cpu")) is None
    tasks = learner.open_tasks("train").tasks(torch.tensor([3, 11, 12]))
    params = learner.meta_parameters()
    found = learner.outer_gradient(params, tasks).gradients
    assert {"features", "pull_back", "along"} <= set(passes)
    learner.network.kernels = False  # type: ignore[assignment]
    start, losses = without_prefix(params, "network."), (learner.support_loss, learner.query_loss)
    by_loop = by_hand(Problem(start, *losses, lr=0.1, steps=2), tasks).gradients.start
    assert_equal(found.values(), by_loop.values())


def test_where_the_head_alone_adapts_features_are_computed_once(passes: list[str]) -> None:
    """Steps cost no pass through the network."""
    values = {"learner": "anil", "filters": 16, "inner_steps": 6, "task_batch": 5}
    worker = worker_of("maml-glyphs-5way-1shot", kernels="native", **values)
    params, ids = worker.learner.meta_parameters(), torch.arange(5)
    worker.share(params, ids, worker.learner)  # the first call also checks what losses read
    passes.clear()
    worker.share(params, ids, worker.learner)
    assert sorted(passes) == ["features", "features", "pull_back", "pull_back"]


@pytest.mark.parametrize(
    "change",
    [
        lambda network: setattr(network.blocks[1].conv, "dilation", (2, 2)),
        lambda network: setattr(network.blocks[1], "conv", nn.Conv2d(16, 16, 3, 2, 1, bias=False)),
        lambda network: setattr(network.blocks[2], "norm", nn.Identity()),
        lambda network: setattr(network.blocks[2].norm, "eps", 1e-5),
        lambda network: network.blocks[1].register_forward_hook(lambda *given: given[2]),
        lambda network: network.to(torch.bfloat16),
    ],
)
def test_what_is_not_as_it_was_built_is_left_to_torch(change: Any, passes: list[str]) -> None:
    network = Conv4((1, 28, 28), 5, filters=16, pool=False)
    assert network.why_torch() is None
    change(network)
    assert network.why_torch() is not None
    assert not network._meets_kernels(torch.rand(2, 1, 28, 28), None) and not passes
