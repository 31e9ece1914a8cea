"""Proto-MAML against a plain loop with ``create_graph``, and over the topologies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets.tasks import Task
from maml.config.cli import parse
from maml.errors import UserError
from maml.learners import build_learner
from maml.params import Params
from maml.worker import Worker
from tests.compiler import needs_compiler
from tests.launching import run, torchrun
from tests.runs import last
from tests.workers import worker_of

IDS = torch.tensor([3, 11, 12])
RATE, STEPS = 0.05, 2


def make_worker(**changes: object) -> Worker:
    values = {"learner": "protomaml", "filters": 8, "shots": 2, "inner_steps": STEPS, **changes}
    return worker_of("maml-glyphs-5way-1shot", **{"inner_lr": RATE, **values})


def adapted(worker: Worker, weights: Params, task: Task, moves: bool) -> tuple[Params, Tensor]:
    """The body and the output layer ``[N, F + 1]`` after the inner loop, in plain autograd."""

    def features(at: Params, x: Tensor) -> Tensor:
        return torch.func.functional_call(worker.learner.network, at, (x, None))[0]

    begun = features(weights, task.support_x)
    centres = torch.stack([begun[task.support_y == k].mean(0) for k in range(5)])
    layer = torch.cat([2 * centres, -centres.square().sum(1, keepdim=True)], dim=1)
    # Copies: a step does not go through the prototypes; the meta-gradient does.
    at = {name: weight.clone() for name, weight in weights.items()}
    for _ in range(STEPS):
        logits = F.linear(features(at, task.support_x), layer[:, :-1], layer[:, -1])
        loss = F.cross_entropy(logits, task.support_y)
        moving = [*at.values()] if moves else []
        *by, of_layer = torch.autograd.grad(loss, [*moving, layer], create_graph=True)
        if moves:
            at = {n: p - RATE * g for (n, p), g in zip(at.items(), by, strict=True)}
        layer = layer - RATE * of_layer
    return at, layer


@pytest.mark.parametrize("adapt", [None, "@head"])
@pytest.mark.parametrize(
    "way",
    [
        {"kernels": "torch", "meta_gradient": "reverse"},
        {"kernels": "torch", "meta_gradient": "mixed"},
        pytest.param({"kernels": "native"}, marks=needs_compiler),
    ],
    ids=str,
)
def test_equals_a_plain_loop(adapt: str | None, way: dict[str, object]) -> None:
    """Also where the body does not adapt; prototypes are differentiated through either way."""
    worker = make_worker(adapt=adapt, **way)
    own = worker.learner
    params = own.meta_parameters()
    assert not any("head" in name for name in params)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    total = torch.zeros((), dtype=torch.float64)
    for parts in zip(*worker.training.tasks(IDS), strict=True):
        task = Task(*parts)
        at, layer = adapted(worker, own.network_weights(leaves), task, adapt is None)
        outputs = torch.func.functional_call(own.network, at, (task.query_x, None))[0]
        total = total + F.cross_entropy(
            F.linear(outputs, layer[:, :-1], layer[:, -1]), task.query_y
        )
    expected = torch.autograd.grad(total, list(leaves.values()))
    found = worker.share(params, IDS, own)
    assert found.totals[0].item() == pytest.approx(total.item(), rel=1e-12)
    for (name, gradient), wanted in zip(found.gradients.items(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10, msg=name)


def test_without_steps_it_is_the_nearest_prototype_of_any_number_of_classes() -> None:
    worker = make_worker(eval_inner_steps=0, ways=3)
    own, tasks = worker.learner, worker.evaluation("test").tasks(IDS)
    answers = own.predictions(own.meta_parameters(), tasks, 0).transductive[1]
    task = Task(*(part[1] for part in tasks))
    weights = own.network_weights(own.meta_parameters())
    support, query = (own.features_of(weights, x)[0] for x in (task.support_x, task.query_x))
    centres = torch.stack([support[task.support_y == k].mean(0) for k in range(3)])
    near = (-torch.cdist(query, centres).square()).log_softmax(1)
    torch.testing.assert_close(answers.log_softmax(1), near, rtol=1e-9, atol=1e-10)


def test_numbers_have_no_prototypes() -> None:
    with pytest.raises(UserError, match="--learner protomaml: has prototypes of classes, and the"):
        build_learner(parse(["maml-sinusoid-10shot", "--learner", "protomaml"]))


def test_every_topology_trains_the_same(tmp_path: Path) -> None:
    """Five tasks divide by no number of processes but one."""
    flags = [
        *("maml-glyphs-5way-1shot", "--learner", "protomaml", "--filters", "8"),
        *("--meta-batch-size", "5", "--iterations", "2", "--inner-lr", "0.05"),
        *("--dtype", "float64", "--eval-every", "0", "--test-tasks", "4", "--logger", "none"),
    ]
    script = ["-m", "tests.strategies.topologies", str(tmp_path)]
    run([sys.executable, *script, json.dumps({"local": flags})], timeout=60)
    both = {name: [*flags, "--strategy", name] for name in ("rpc", "allreduce")}
    run([*torchrun(2, script[:2]), str(tmp_path), json.dumps(both)], timeout=120)
    expected = last(tmp_path / "local")["model"]
    for name in both:
        for key, tensor in last(tmp_path / name)["model"].items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-10, msg=name)
