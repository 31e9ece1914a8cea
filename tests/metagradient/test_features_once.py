"""Where the output layer alone adapts, features are computed once, by kernels or not."""

from typing import Any

import pytest
import torch

from maml.kernels.convnet import ConvNet
from maml.worker import Worker
from tests.compiler import needs_compiler
from tests.workers import worker_of

IDS = torch.tensor([3, 11, 12, 40, 7])


def make_worker(**changes: Any) -> Worker:
    values = {"task_batch": 3, "inner_steps": 3, "filters": 16, "inner_lr": 0.1, **changes}
    return worker_of("anil-glyphs-5way-1shot", **values)


@needs_compiler
@pytest.mark.parametrize("steps", [1, 6])
def test_steps_cost_no_pass_through_the_network(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    call = ConvNet._call

    def counted(self: ConvNet, name: str, *arguments: Any) -> Any:
        passes.append(name)
        return call(self, name, *arguments)

    worker = make_worker(inner_steps=steps, task_batch=5)
    params = worker.learner.meta_parameters()
    worker.share(params, IDS, worker.learner)  # what losses read is looked at once
    monkeypatch.setattr(ConvNet, "_call", counted)
    worker.share(params, IDS, worker.learner)
    assert sorted(passes) == ["features", "features", "pull_back", "pull_back"]
