"""The meta-gradient against oracles: a closed form, central differences, another library."""

import pytest
import torch
from torch import Tensor

from maml.metagradient.problem import Problem
from maml.metagradient.rules import OPTIMIZERS
from maml.metagradient.unrolled import adapt, outer_loss
from maml.params import Params
from maml.worker import Worker
from tests.metagradient.peer import LogitsOnly, accumulate_gradients, oracle
from tests.workers import worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])


def make_worker(preset: str, **changes: object) -> Worker:
    return worker_of(preset, **{"task_batch": 3, "inner_steps": 3, **changes})


@pytest.mark.parametrize("order", ["second", "first"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closed_form_of_linear_regression(steps: int, order: str) -> None:
    """Mean squared error of X w: every derivative is a product of known matrices."""
    generator = torch.Generator().manual_seed(1)
    x, y, x_query, y_query, w = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in [(6, 4), (6,), (8, 4), (8,), (4,)]
    )
    rate = 0.05

    def support(params: Params, task: None, step: int) -> tuple[Tensor, Tensor]:
        error = x @ params["w"] - y
        return (error**2).mean(), error

    def query(params: Params, task: None, step: int) -> tuple[Tensor, Tensor]:
        error = x_query @ params["w"] - y_query
        return (error**2).mean(), error

    def outer(params: Params) -> Tensor:
        return outer_loss(Problem(params, support, query, lr=rate, steps=steps, order=order), None)[
            0
        ]

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


@pytest.mark.parametrize("preset", ["maml-sinusoid-10shot", "maml-glyphs-5way-1shot"])
def test_central_differences(preset: str) -> None:
    """The second-order gradient along random directions, against (f(θ+εv) − f(θ−εv)) / 2ε."""
    worker = make_worker(preset, inner_lr=0.05)
    params = {k: v.detach() for k, v in worker.learner.meta_parameters().items()}
    share = worker.share(params, IDS, worker.learner)

    def total_loss(shift: dict[str, Tensor], scale: float) -> Tensor:
        moved = {k: v + scale * shift[k] for k, v in params.items()}
        return worker.share(moved, IDS, worker.learner).totals[0]

    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        direction = {
            k: torch.randn(v.shape, dtype=v.dtype, generator=generator) for k, v in params.items()
        }
        norm = torch.stack([v.square().sum() for v in direction.values()]).sum().sqrt()
        direction = {k: v / norm for k, v in direction.items()}
        # The inner gradient jumps where a ReLU changes side, so the outer loss does: small
        # enough that none does, large enough for float64.
        epsilon = 1e-6
        numeric = (total_loss(direction, epsilon) - total_loss(direction, -epsilon)) / (2 * epsilon)
        exact = torch.stack([(share.gradients[k] * direction[k]).sum() for k in params]).sum()
        torch.testing.assert_close(exact, numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("preset", ["maml-glyphs-5way-1shot", "maml-sinusoid-10shot"])
def test_equals_learn2learn(preset: str, first_order: bool) -> None:
    """The same gradient as learn2learn's MAML, which walks task by task."""
    order = "first" if first_order else "second"
    worker = make_worker(preset, order=order, inner_steps=3, inner_lr=0.1)
    params = worker.learner.meta_parameters()
    share = worker.share(params, IDS, worker.learner)

    network = LogitsOnly(worker.learner.network)
    peer = oracle("MAML")(network, lr=0.1, first_order=first_order)
    loss = worker.learner.objective.loss
    accumulate_gradients(peer, worker.training.tasks(IDS), loss, steps=3)
    for name, parameter in worker.learner.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(share.gradients[name], parameter.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "order"), [*((name, "second") for name in sorted(OPTIMIZERS)), ("adam", "first")]
)
def test_every_inner_optimizer_batches_over_tasks(name: str, order: str) -> None:
    """A batch of tasks gives the finite sum of what each gives alone.

    The network has units that are off for a whole support set, whose gradient is exactly zero.
    """
    worker = make_worker(
        "maml-sinusoid-10shot",
        inner_optimizer=name,
        inner_lr=0.01,
        inner_steps=8,
        order=order,
        task_batch=5,
    )
    params = worker.learner.meta_parameters()
    together = worker.share(params, IDS, worker.learner)
    alone = [worker.share(params, i[None], worker.learner) for i in IDS]
    for key, gradient in together.gradients.items():
        total = sum(share.gradients[key] for share in alone)
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, total, rtol=1e-9, atol=1e-10)


def test_every_inner_optimizer_equals_torch() -> None:
    """The rules are the published ones: torch.optim's, on plain tensors, over three steps."""
    peers = {
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
        "adam0": (torch.optim.Adam, {"betas": (0.0, 0.999)}),
    }
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    target = torch.tensor([0.3, 0.1, -0.7], dtype=torch.float64)

    def loss(params: Params, task: None, step: int) -> tuple[Tensor, Tensor]:
        return ((params["w"] - target) ** 3).abs().sum(), params["w"]

    assert peers.keys() == OPTIMIZERS.keys()
    for name, (peer, options) in peers.items():
        problem = Problem({"w": start}, loss, loss, optimizer=name, lr=0.05, steps=3)
        adapted = adapt(problem, None)["w"]
        w = start.clone().requires_grad_()
        optimizer = peer([w], lr=0.05, **options)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.zero_grad()
            ((w - target) ** 3).abs().sum().backward()
            optimizer.step()
        torch.testing.assert_close(adapted, w.detach(), rtol=1e-12, atol=1e-12, msg=name)


def test_unused_meta_parameter_is_refused() -> None:
    """A meta-parameter that no loss depends on raises instead of standing still silently."""
    worker = make_worker("maml-sinusoid-10shot")
    params = worker.learner.meta_parameters() | {"network.stray": torch.zeros(2)}
    call = worker.learner.call_network
    worker.learner.call_network = lambda weights, x, statistics=None: call(  # type: ignore[method-assign]
        {k: v for k, v in weights.items() if k != "stray"}, x, statistics
    )
    with pytest.raises(RuntimeError, match="not have been used"):
        worker.share(params, IDS, worker.learner)


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


@pytest.mark.parametrize(
    ("preset", "name", "steps", "order"),
    [
        ("maml-glyphs-5way-1shot", "sgd", 9, "second"),
        ("maml-glyphs-5way-1shot", "adam", 4, "second"),
        ("maml-glyphs-5way-1shot", "sgd", 4, "first"),
        ("maml-sinusoid-10shot", "sgd", 0, "second"),
        ("maml-sinusoid-10shot", "momentum", 9, "first"),
    ],
)
def test_mixed_equals_reverse(preset: str, name: str, steps: int, order: str) -> None:
    """Forward over reverse multiplies the same factors in another order, of real networks too.

    What problems can state beside is in `test_problem.py`, of random ones.
    Nine steps are more than are remembered: their activations are computed again.
    """
    changes = {"inner_optimizer": name, "inner_lr": 0.01, "order": order, "inner_steps": steps}
    changes |= {"kernels": "torch", "filters": 8}
    reverse = make_worker(preset, meta_gradient="reverse", **changes)
    mixed = make_worker(preset, meta_gradient="mixed", **changes)
    params = reverse.learner.meta_parameters()
    expected = reverse.share(params, IDS, reverse.learner)
    share = mixed.share(params, IDS, mixed.learner)
    torch.testing.assert_close(share.totals, expected.totals, rtol=1e-12, atol=1e-12)
    for key, gradient in expected.gradients.items():
        # The scale of the largest element: rules that divide by a root blow others' noise up.
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(share.gradients[key], gradient, rtol=0, atol=1e-10 * scale)
