"""learn2learn's learners, which walk task by task, as an oracle."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from datasets.tasks import Task


def oracle(name: str, room: str = "algorithms") -> Any:
    """Return learn2learn's ``name``; where it cannot be had, the test that asks is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        algorithms = pytest.importorskip(
            f"learn2learn.{room}", reason="pip has no learn2learn for this Python, uv has"
        )
    return getattr(algorithms, name)


class LogitsOnly(nn.Module):
    """A network without its statistics, as other libraries expect it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)[0]
        return outputs


def accumulate_gradients(
    peer: Any, tasks: Task, loss: Callable[[Tensor, Tensor], Tensor], steps: int
) -> None:
    """Add up the meta-gradient of B tasks in the ``grad`` of the peer's parameters."""
    for i in range(len(tasks.support_x)):
        clone = peer.clone()
        for _ in range(steps):
            clone.adapt(loss(clone(tasks.support_x[i]), tasks.support_y[i]))
        loss(clone(tasks.query_x[i]), tasks.query_y[i]).backward()
