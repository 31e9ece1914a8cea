"""What torch's layers refuse is refused where other operations take their place."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from maml.errors import UserError
from maml.networks.calls import apply
from maml.networks.conv4 import Conv4
from maml.networks.ordinary import explicit, tensors
from maml.networks.statistics import OneValueError
from tests.runs import worker_of


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


SIZES = (
    *((3, 4), (1, 4), (3, 5), (3, 1), (4,), ()),
    *((3, 4, 2), (1, 4, 1), (2, 4, 1), (3, 5, 2), (3, 4, 2, 2), (1, 4, 1, 1), (2, 4, 1, 1)),
    *((3, 1, 2, 2), (1, 4, 2, 1, 1), (1, 4, 1, 1, 1)),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)
KINDS = [getattr(nn, f"{kind}Norm{n}d") for kind in ("Batch", "Instance") for n in (1, 2, 3)]
OPTIONS: list[dict[str, Any]] = [
    {}, {"affine": True}, {"affine": False}, {"affine": True, "track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no statistics": lambda x, w: F.batch_norm(x, None, None, w, w),
    "F.batch_norm": lambda x, w: F.batch_norm(x, None, None, w, None, True),
    "torch.batch_norm": lambda x, w: torch.batch_norm(
        x, w, None, None, None, True, 0.1, 1e-5, False
    ),
    "F.instance_norm": lambda x, w: F.instance_norm(x, None, None, w, w),
    "F.layer_norm": lambda x, w: F.layer_norm(x, [4], None, w),
    "padding outside": lambda x, w: F.embedding(x, w[:, None], padding_idx=4),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{kind.__name__} {options}": functools.partial(kind, 4, **options)
        for kind in KINDS
        for options in OPTIONS
    },
    "batch norm, evaluating": lambda: nn.BatchNorm1d(4).eval(),
    "batch norm, evaluating, no scale": lambda: nn.BatchNorm2d(4, affine=False).eval(),
    "layer norm": lambda: nn.LayerNorm(4),
    "layer norm of two dimensions": lambda: nn.LayerNorm((4, 2), bias=False),
    "layer norm, no scale": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=0),
    **{name: functools.partial(Calling, function) for name, function in FUNCTIONS.items()},
}


def answer_to(call: Callable[[Tensor], Any], x: Tensor) -> Tensor | None:
    """Return the answer, or None where it is refused."""
    try:
        return call(x.clone())
    except (RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError):
        return None


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_refuses_what_torch_s_refuses(name: str) -> None:
    """Alone and in a batch of tasks, each size and dtype; what both answer is the same."""
    layer = LAYERS[name]()
    network, answered = explicit(copy.deepcopy(layer), name), 0
    own = tensors(network)
    torch.manual_seed(0)

    def batched(x: Tensor) -> Tensor:
        given = {n: torch.stack([t, t]) for n, t in own.items()}
        call = torch.func.vmap(lambda p, x: apply(network, p, x)[0])
        return call(given, torch.stack([x, x]))[1]

    for size in SIZES:
        for dtype in DTYPES:
            x, theirs = torch.randn(size).mul(3).abs().to(dtype), copy.deepcopy(layer)
            if not own and dtype.is_floating_point:  # torch's statistics, of which ours has none
                theirs = theirs.to(dtype)
            expected = answer_to(theirs, x)
            answered += expected is not None
            for call in (lambda x: apply(network, own, x)[0], batched):
                found = answer_to(call, x)
                assert (found is None) == (expected is None), (size, dtype)
                if found is not None and expected is not None and dtype != torch.bfloat16:
                    assert (found - expected).abs().max() < 1e-4, (size, dtype)
    assert answered or name in ("no statistics", "padding outside")


def test_given_statistics_normalise_one_example() -> None:
    network, x = explicit(nn.BatchNorm1d(4), "x"), torch.randn(3, 4)
    whole, used = network(x)
    torch.testing.assert_close(network(x[:1], used)[0], whole[:1])
    with pytest.raises(OneValueError, match=r"^Expected more than 1 value .* \[1, 4\]: .* group"):
        network(x[:1])


@pytest.mark.parametrize("pool", [False, True])
def test_compiled_blocks_leave_one_pixel_to_the_norm(pool: bool) -> None:
    """Strided blocks end with one pixel of 16 by 16; pooled ones normalise four."""
    x, y = torch.rand(2, 5, 1, 16, 16), torch.arange(5).repeat(2, 1)
    network = Conv4((1, 16, 16), 5, filters=16, pool=pool)
    learner, refused = maml.MAML(network), contextlib.nullcontext()
    for tasks in ((x, y, x[:, :1], y[:, :1]), (x[:, :1], y[:, :1], x, y)):
        with refused if pool else pytest.raises(OneValueError):
            learner(tasks)
    with refused if pool else pytest.raises(OneValueError):
        network(x[0, :1])
    assert learner((x, y, x, y)).isfinite()


def test_a_run_s_single_queries_are_refused() -> None:
    """Their numbers would have no transductive column, which a run's files have."""
    worker = worker_of("maml-sinusoid-10shot", network=f"{__name__}:Normed", eval_queries=1)
    with pytest.raises(UserError, match=r"^a task of one query .*--eval-queries"):
        worker.evaluate(worker.learner.meta_parameters(), "test", torch.arange(2))


class Normed(nn.Sequential):
    def __init__(self, shape: Any, outputs: int) -> None:
        super().__init__(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
