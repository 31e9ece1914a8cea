"""iMAML's meta-gradient and its parts against closed forms and the unrolled inner loop."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.tasks import Task
from maml.metagradient import at_end
from maml.metagradient.function import Derivatives
from maml.metagradient.problem import Implicit, Problem
from maml.params import Params
from maml.worker import Worker
from tests.metagradient.peer import losses_of, randn
from tests.runs import worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])
PROXIMAL = 2.0


make_worker = partial(
    worker_of, "maml-sinusoid-10shot", learner="imaml", task_batch=3, inner_lr=0.1, inner_steps=4,
    proximal=PROXIMAL,
)  # fmt: skip


@pytest.mark.parametrize("damping", [0.0, 1.0])
def test_closed_form_of_linear_regression(damping: float) -> None:
    """The inner loop has converged; conjugate gradient takes a step for each unknown."""
    task = Task(*(randn(3, *shape, seed=i) for i, shape in enumerate([(6, 4), (6,), (8, 4), (8,)])))
    start, decay = randn(4, seed=9), torch.tensor(0.3, dtype=torch.float64)
    of = losses_of(lambda at, x, _: x @ at["w"], F.mse_loss)

    def support(at: Params, task: Task, step: int) -> tuple[Tensor, Tensor]:
        loss, outputs = of["support"](at, task, step)
        return loss + at["decay"] / 2 * at["w"].square().sum(), outputs

    problem = Problem(
        {"w": start}, support, of["query"], fixed={"decay": decay},
        lr=0.1, steps=1500, proximal=PROXIMAL, implicit=Implicit(4, damping),
    )  # fmt: skip
    outer = at_end.at_solution(problem, task, Derivatives(problem))
    expected, by_decay = torch.zeros_like(start), torch.zeros_like(decay)
    identity = torch.eye(4, dtype=torch.float64)
    for i in range(3):
        x, y, x_query, y_query = (tensor[i] for tensor in task)
        hessian = 2 / 6 * x.T @ x + decay * identity  # of the mean of 6 squared errors, decayed
        # The gradient of the inner problem is zero here.
        phi = torch.linalg.solve(hessian + PROXIMAL * identity, 2 / 6 * x.T @ y + PROXIMAL * start)
        query = 2 / 8 * x_query.T @ (x_query @ phi - y_query)
        found = torch.linalg.solve((1 + damping) * identity + hessian / PROXIMAL, query)
        expected += found
        by_decay -= phi @ found / PROXIMAL  # φ is the support gradient's derivative by the decay
        assert outer.losses[i].item() == pytest.approx(
            (x_query @ phi - y_query).square().mean().item(), rel=1e-10
        )
    torch.testing.assert_close(outer.gradients.start["w"], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(outer.gradients.fixed["decay"], by_decay, rtol=1e-10, atol=1e-12)


def test_a_gradient_is_bounded_where_the_loop_has_not_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H has negative eigenvalues there, so conjugate gradient must not divide by each curvature."""

    def norms(cg_steps: int) -> Tensor:
        worker = make_worker(task_batch=1, cg_steps=cg_steps)
        params = worker.learner.meta_parameters()
        shares = (worker.share(params, task[None], worker.learner) for task in tasks)
        flat = (torch.cat([g.flatten() for g in share.gradients.values()]) for share in shares)
        return torch.stack([gradient.norm() for gradient in flat])

    tasks = torch.arange(60)
    of_query = norms(0)
    assert (norms(5) / of_query).max() < 1 / at_end.LEAST_CURVATURE
    monkeypatch.setattr(at_end, "LEAST_CURVATURE", 0.0)
    assert (norms(5) / of_query).max() > 10


def test_the_released_command() -> None:
    """Plain steps, then one step of the pull; solve with 2 I + H / --cg-lambda; no pull at test.

    Without its flags, evaluation pulls in every step, as training does.
    """
    values: dict[str, Any] = {"pull": "end", "cg_lambda": 40.0, "cg_damping": 1.0, "cg_steps": 80}
    worker = make_worker(inner_steps=3, eval_proximal=0.0, network="mlp", **values)
    params = {k: t.detach() for k, t in worker.learner.meta_parameters().items()}
    start = worker.learner.network_weights(params)
    tasks = worker.training.tasks(IDS[:1])
    task = Task(*(tensor[0] for tensor in tasks))
    sizes = [tensor.numel() for tensor in start.values()]

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(start.items(), flat.split(sizes), strict=True)
        own = {name: part.view(tensor.shape) for (name, tensor), part in parts}
        return worker.learner.set_loss(own, x, y)[0]

    def at_test(worker: Worker) -> Tensor:
        adapted = worker.learner.adapted(params, task, 3)
        return torch.cat([adapted[name].flatten() for name in start])

    theta = torch.cat([tensor.flatten() for tensor in start.values()])
    phi = pulled = theta
    by = torch.func.grad(loss)
    for _ in range(3):
        phi = phi - 0.1 * by(phi, task.support_x, task.support_y)
        by_support = by(pulled, task.support_x, task.support_y)
        pulled = pulled - 0.1 * (by_support + PROXIMAL * (pulled - theta))
    torch.testing.assert_close(at_test(worker), phi, rtol=0, atol=1e-13)
    torch.testing.assert_close(at_test(make_worker(network="mlp")), pulled, rtol=0, atol=1e-13)
    phi = phi - 0.1 * PROXIMAL * (phi - theta)
    hessian = torch.func.hessian(loss)(phi, task.support_x, task.support_y)
    matrix = 2 * torch.eye(len(phi), dtype=torch.float64) + hessian / 40
    assert torch.linalg.eigvalsh(matrix).min() > 1  # no step is cut short
    query = by(phi, task.query_x, task.query_y)
    expected = torch.linalg.solve(matrix, query)
    found = worker.share(params, IDS[:1], worker.learner).gradients
    flat = torch.cat([found[f"network.{name}"].flatten() for name in start])
    torch.testing.assert_close(flat, expected, rtol=1e-8, atol=1e-10)


def test_conjugate_gradient_ends_for_each_task_by_itself() -> None:
    """Zero, solved at once, not positive along b, not positive further on, and an ordinary one."""
    root, right = randn(5, 8, 8, seed=3), randn(5, 8, seed=4)
    matrices = root @ root.mT + torch.eye(8, dtype=torch.float64)
    right[0] = 0
    matrices[1] = 4 * torch.eye(8, dtype=torch.float64)
    matrices[2] = -torch.eye(8, dtype=torch.float64)
    matrices[3] = torch.diag(torch.tensor([5.0, 4, 3, 2, 1, 1, 1, -2], dtype=torch.float64))
    right[3] = torch.tensor([1.0] * 7 + [0.5], dtype=torch.float64)

    def product(vector: Params) -> Params:
        return {"w": torch.einsum("bij,bj->bi", matrices, vector["w"])}

    found = at_end.conjugate_gradient(product, {"w": right}, 30)["w"]
    assert found.isfinite().all()
    assert not found[0].any()
    torch.testing.assert_close(found[1], right[1] / 4, rtol=1e-14, atol=0)
    assert torch.equal(found[2], right[2])
    halved = at_end.conjugate_gradient(product, {"w": right}, 30, 0.0, 0.5)["w"]
    assert torch.equal(halved[2], 0.5 * right[2])
    assert torch.equal(halved[4], found[4])
    # It stopped at a point that is still downhill from zero: x · b > 0.
    assert found[3] @ right[3] > 0
    assert not torch.equal(found[3], right[3])
    solved = torch.linalg.solve(matrices[4], right[4])
    torch.testing.assert_close(found[4], solved, rtol=1e-10, atol=1e-12)
