"""MAML++ against a walk by hand, with all of its parts and with any of them turned off."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.tasks import Task
from maml.errors import UserError
from maml.metagradient.problem import Problem
from maml.params import Params, without_prefix
from maml.worker import Share, Worker
from tests.metagradient.peer import by_hand, losses_of
from tests.runs import moved, worker_of

STEPS, BATCH = 2, 3
make_worker = partial(
    worker_of, "mamlpp-glyphs-5way-1shot", filters=16, inner_steps=STEPS, inner_lr=0.1, queries=2,
    meta_batch_size=BATCH, iterations_per_epoch=2, msl_epochs=2, kernels="torch",
)  # fmt: skip


@pytest.mark.parametrize("adapt", ["*", "@head,*.norm.bias"])
def test_norms_of_each_step_do_not_adapt(adapt: str) -> None:
    """Else they would silently not adapt."""
    with pytest.raises(UserError, match=r"--adapt .*: blocks\.0\.norm\..* --no-per-step-norm"):
        make_worker(adapt=adapt)
    make_worker(adapt=adapt, per_step_norm=False)


def of_iteration(worker: Worker, params: Params, iteration: int) -> Share:
    ids = worker.training.ids(iteration, BATCH)
    return worker.share(params, ids, worker.learner)


def expected_of(worker: Worker, params: Params, iteration: int, weights: list[float]) -> Params:
    """The released code's loop, in plain autograd."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    own, rates, norms = (without_prefix(leaves, p) for p in ("network.", "rates.", "norms."))

    def logits(at: Params, x: Tensor, step: int) -> Tensor:
        for i in range(4):
            conv, norm = f"blocks.{i}.conv", f"blocks.{i}.norm"
            x = F.conv2d(x, at[f"{conv}.weight"], at[f"{conv}.bias"], padding=1)
            scale, shift = at[f"{norm}.weight"], at[f"{norm}.bias"]
            x = F.batch_norm(x, None, None, scale, shift, training=True, eps=1e-5)
            x = F.max_pool2d(F.leaky_relu(x), 2)
        return F.linear(x.flatten(1), at["head.weight"], at["head.bias"])

    problem = Problem(
        start={name: tensor for name, tensor in own.items() if ".norm." not in name},
        fixed={name: tensor for name, tensor in own.items() if ".norm." in name},
        **losses_of(logits, F.cross_entropy),
        lr=1.0 if rates else 0.1,
        rates=[{n: r[step] for n, r in rates.items()} for step in range(STEPS)] if rates else None,
        step_params=[{n: tensor[step] for n, tensor in norms.items()} for step in range(STEPS)],
        query_weights=weights,
        order="first" if iteration // 2 < worker.config.first_order_epochs else "second",
        steps=STEPS,
    )
    tasks = worker.training.tasks(worker.training.ids(iteration, BATCH))
    return problem.tensors().pull_back(by_hand(problem, tasks).gradients, leaves)


@pytest.mark.parametrize(
    ("changes", "iteration", "weights"),
    [
        ({}, 2, [0.25, 0.75]),
        ({}, 4, [0, 1]),
        ({"msl_epochs": 0, "first_order_epochs": 1}, 1, [0, 1]),
        ({"lslr": False}, 3, [0.25, 0.75]),
        ({"per_step_norm": False}, 0, [0.5, 0.5]),
    ],
)
def test_equals_a_walk_by_hand(
    changes: dict[str, object], iteration: int, weights: list[float]
) -> None:
    """Each part in its phase; after its last iteration a schedule keeps its last value."""
    worker = make_worker(**changes)
    params = moved(worker)
    found = of_iteration(worker, params, iteration).gradients
    expected = expected_of(worker, params, iteration, weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_tasks_know_their_iteration() -> None:
    """One call may have tasks of several phases, if others are late; each has its own phase."""
    worker = make_worker()
    params = moved(worker)
    together = worker.share(params, torch.arange(4 * BATCH), worker.learner)
    apart = [of_iteration(worker, params, iteration) for iteration in range(4)]
    for name, gradient in together.gradients.items():
        total = sum(share.gradients[name] for share in apart)
        torch.testing.assert_close(gradient, total, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("steps", [0, 4])
def test_evaluates_with_any_number_of_steps(steps: int) -> None:
    """Steps beyond those of training use the last step's rates and norms."""
    worker = make_worker(eval_inner_steps=steps)
    params = moved(worker)
    task = Task(*(tensor[0] for tensor in worker.training.tasks(torch.arange(1))))
    found = worker.learner.adapted(params, task, steps)
    norm = "blocks.1.norm.weight"
    last = max(min(steps, STEPS) - 1, 0)
    torch.testing.assert_close(found[norm], params[f"norms.{norm}"][last])
    if steps == 4:
        three = worker.learner.adapted(params, task, 3)
        problem = worker.learner.problem(params, 4)
        gradient = torch.func.grad(lambda at: problem.support(problem.params(at, 3), task, 3)[0])(
            {name: three[name] for name in problem.start}
        )
        head = "head.weight"
        rate = params[f"rates.{head}"][STEPS - 1]
        torch.testing.assert_close(found[head], three[head] - rate * gradient[head])
