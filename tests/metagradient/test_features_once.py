"""Where the output layer alone adapts, features are computed once, by kernels or not."""

from typing import Any

import pytest
import torch

from maml.kernels.convnet import ConvNet
from maml.worker import Worker
from tests.compiler import needs_compiler
from tests.metagradient.test_rates import assert_same
from tests.workers import moved, worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])


def make_worker(**changes: Any) -> Worker:
    values = {"task_batch": 3, "inner_steps": 3, "filters": 16, "inner_lr": 0.1, **changes}
    return worker_of("anil-glyphs-5way-1shot", **values)


LOOPS: dict[str, dict[str, Any]] = {
    "ANIL": {},
    "pooled": {"network": "conv4-pool"},
    "first order": {"order": "first"},
    "Adam": {"inner_optimizer": "adam", "inner_lr": 0.01},
    "its matrix alone, and faster": {"learner": "maml", "adapt": "head.weight=3"},
    "learned rates": {"learner": "metasgd", "adapt": "@head"},
    "transformed gradients": {"learner": "metacurv", "adapt": "@head"},
    "several query losses": {
        "learner": "mamlpp", "adapt": "@head", "per_step_norm": False, "msl_epochs": 3,
    },
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("loop", LOOPS)
def test_equals_torch(loop: str) -> None:
    """Both the meta-gradient and what is answered after adapting, in float64."""
    expected = make_worker(kernels="torch", meta_gradient="reverse", **LOOPS[loop])
    found = make_worker(kernels="native", **LOOPS[loop])
    params = moved(expected)
    of_torch = expected.share(params, IDS, expected.learner)
    assert_same(found.share(params, IDS, found.learner), of_torch)
    scores = [w.evaluate(params, "test", IDS, w.learner) for w in (found, expected)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-10)


@needs_compiler
def test_steps_cost_no_pass_through_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    call = ConvNet._call

    def counted(self: ConvNet, name: str, *arguments: Any) -> Any:
        passes.append(name)
        return call(self, name, *arguments)

    worker = make_worker(inner_steps=6, task_batch=5)
    params = worker.learner.meta_parameters()
    worker.share(params, IDS, worker.learner)  # what losses read is looked at once
    monkeypatch.setattr(ConvNet, "_call", counted)
    worker.share(params, IDS, worker.learner)
    assert sorted(passes) == ["features", "features", "pull_back", "pull_back"]
