"""Convolutions over tasks against torch's own, one task at a time, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maml.ops.instead import instead

CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": (F.conv1d, (2, 4, 9), (6, 4, 3), {"stride": 2}),
    "2d": (F.conv2d, (2, 4, 7, 6), (6, 4, 3, 3), {"padding": 1}),
    "2d, same": (F.conv2d, (2, 4, 7, 6), (6, 4, 3, 2), {"padding": "same", "dilation": 2}),
    "2d, dilated, grouped": (F.conv2d, (2, 4, 9, 9), (6, 2, 3, 3), {"dilation": 2, "groups": 2}),
    "3d": (F.conv3d, (2, 2, 4, 5, 4), (3, 2, 3, 2, 3), {"padding": (1, 0, 1)}),
    "1d, transposed, dilated": (
        F.conv_transpose1d, (2, 4, 6), (4, 3, 3), {"stride": 2, "dilation": 2}
    ),
    "3d, transposed": (F.conv_transpose3d, (2, 2, 2, 3, 2), (2, 2, 2, 2, 2), {"stride": 2}),
    "transposed, grouped": (
        F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
    ),
}  # fmt: skip


def results(case: str, n_tasks: int, batched: bool) -> list[Tensor]:
    function, size, of_weight, options = CASES[case]
    torch.manual_seed(0)
    w = torch.randn(of_weight, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64)
    tasks = torch.randn(n_tasks, *size, dtype=torch.float64)

    def inner(w: Tensor, x: Tensor) -> Tensor:
        given = x * w.mean().exp()  # a layer below asks for the gradient by the images
        found = function(given, w, bias=None, **options)
        return (found.tanh() * b[0]).square().mean()

    def outer(x: Tensor) -> Tensor:
        at = w
        for _ in range(2):  # from the second step on, each task has weights of its own
            at = at - 0.5 * torch.func.grad(inner)(at, x)
        return inner(at, x)

    losses = torch.func.vmap(outer)(tasks) if batched else torch.stack([*map(outer, tasks)])
    return [losses, *torch.autograd.grad(losses.sum(), w)]


@pytest.mark.parametrize("case", CASES)
def test_over_tasks_equals_one_task_at_a_time(case: str) -> None:
    expected = results(case, 3, batched=False)
    with instead():
        found = results(case, 3, batched=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class _Count(TorchDispatchMode):
    convolutions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.convolutions += "convolution" in func.name()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("case", CASES)
def test_number_of_convolutions_and_tasks(case: str) -> None:
    """Ours does not grow. When torch's does not grow either, torch's own may serve."""

    def launched(n_tasks: int) -> int:
        with _Count() as counted:
            results(case, n_tasks, batched=True)
        return counted.convolutions

    with instead():
        assert launched(5) == launched(128)
    assert launched(128) > 128
