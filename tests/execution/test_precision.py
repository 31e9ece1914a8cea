"""``--precision``: what is rounded, what is not, and that it still learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maml.config.presets import with_values
from maml.errors import UserError
from maml.execution import precision
from maml.worker import Worker
from tests.runs import glyphs, name_of, result, same, sinusoid, train

CPU = torch.device("cpu")
IDS = torch.tensor([3, 11, 12, 40])
FAMILIES = pytest.mark.parametrize(
    ("family", "changes"),
    [
        (sinusoid, {}),
        (glyphs, {}),
        (glyphs, {"network": "conv4-pool", "filters": 16}),
        (glyphs, {"meta_gradient": "mixed"}),
        (glyphs, {"inner_steps": 3, "inner_lr": 0.1}),
    ],
    ids=name_of,
)


def gradient(config: Any) -> Tensor:
    """The meta-gradient of `IDS`, all of it in one float64 vector."""
    worker = Worker(config, CPU)
    share = worker.share(worker.learner.meta_parameters(), IDS, worker.learner)
    dtype = getattr(torch, config.dtype)
    assert {tensor.dtype for tensor in share.gradients.values()} == {dtype}
    assert share.totals.dtype == dtype
    return torch.cat([tensor.flatten().double() for tensor in share.gradients.values()])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@FAMILIES
def test_errors_against_float64(family: Any, changes: dict[str, Any]) -> None:
    """bfloat16 keeps 8 bits: a product is right to 2⁻⁹, a meta-gradient of dozens of them in a row
    over a batch norm of two images, second derivatives included, to two fifths; float32 to 1e-4.
    """
    config = family(kernels="torch", **changes)
    exact = gradient(with_values(config, dtype="float64"))
    assert error(gradient(config), exact) < 1e-4
    assert 2e-4 < error(gradient(with_values(config, precision="bf16")), exact) < 0.4


class _Dtypes(TorchDispatchMode):
    """Collects the dtypes in which products and reductions are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for word in ("conv", "mm", "var_mean", "log_softmax"):
            if word in str(func) and isinstance(args[0], Tensor):
                self.seen.setdefault(word, set()).add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("meta_gradient", ["reverse", "mixed"])
@pytest.mark.parametrize("name", ["float32", "bf16"])
def test_products_are_rounded_and_nothing_else(name: str, meta_gradient: str) -> None:
    worker = Worker(glyphs(precision=name, kernels="torch", meta_gradient=meta_gradient), CPU)
    with _Dtypes() as dtypes:
        worker.share(worker.learner.meta_parameters(), IDS, worker.learner)
    product = torch.bfloat16 if name == "bf16" else torch.float32
    assert dtypes.seen["conv"] == dtypes.seen["mm"] == {product}
    assert dtypes.seen["var_mean"] == dtypes.seen["log_softmax"] == {torch.float32}


def test_evaluation_is_rounded_alike() -> None:
    rows = {}
    for name in ("float32", "bf16"):
        worker = Worker(glyphs(precision=name, eval_inner_steps=2), CPU)
        rows[name] = worker.evaluate(
            worker.learner.meta_parameters(), "test", torch.arange(6), worker.learner
        )
        assert rows[name].dtype == torch.float32
    losses = (rows["float32"][:, 0], rows["bf16"][:, 0])
    assert not torch.equal(*losses)
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["float32", "tf32", "bf16"])
def test_the_process_is_set(name: str) -> None:
    """TF32 is asked of every library that has it, and by that flag alone: torch's own default lets
    convolutions on a GPU use it unasked.
    """
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = name != "tf32"
    Worker(sinusoid(precision=name), CPU)
    expected = "high" if name == "tf32" else "highest"
    assert torch.get_float32_matmul_precision() == expected
    assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
    assert torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")


def test_tf32_is_no_coarser_than_its_ten_bits() -> None:
    """On a CPU that has none it is float32, bit for bit; else products are right to 2⁻¹¹."""
    found = gradient(sinusoid(precision="tf32"))
    if torch.cpu._is_amx_fp16_supported():
        assert error(found, gradient(sinusoid(dtype="float64"))) < 0.02
    else:
        assert torch.equal(found, gradient(sinusoid()))


def test_every_spelling_of_a_product_is_rounded() -> None:
    a, b = torch.full((2, 2), 1 + 2**-12), torch.eye(2)
    spellings = (
        lambda: a @ b, lambda: a.matmul(b), lambda: torch.mm(a, b), lambda: torch.addmm(b, a, b),
        lambda: torch.nn.functional.linear(a, weight=b), lambda: torch.matmul(a, other=b),
        lambda: torch.nn.Conv2d(1, 1, 1, bias=False)(a[None, None]),
    )  # fmt: skip
    for spelling in spellings:
        with precision.products("bf16"):
            assert spelling().dtype == torch.bfloat16
            assert torch.equal(a + 0, a), "a sum is none"
        for name in ("float32", "tf32"):
            with precision.products(name):
                assert spelling().dtype == torch.float32


def test_kernels_do_not_serve_bf16() -> None:
    assert Worker(glyphs(filters=16, precision="bf16"), CPU).learner.in_torch(CPU)
    with pytest.raises(UserError, match=r"--kernels native: .*--precision bf16"):
        Worker(glyphs(filters=16, precision="bf16", kernels="native"), CPU)


def test_it_trains_otherwise_and_resumes_only_alike(tmp_path: Path) -> None:
    rounded = train(glyphs(precision="bf16"), tmp_path / "bf16")
    again = train(glyphs(precision="bf16"), tmp_path / "again")
    exact = train(glyphs(kernels="torch"), tmp_path / "float32")
    assert same(rounded["model"], again["model"])
    assert not same(rounded["model"], exact["model"])
    with pytest.raises(UserError, match=r"--precision is float32, but .* with bf16"):
        train(glyphs(iterations=3), tmp_path / "bf16")


@pytest.mark.usefixtures("no_pictures")
def test_bf16_learns_as_float32_does(tmp_path: Path) -> None:
    """Accuracy after a short run, over 60 tasks of two classes: chance is a half."""
    config = glyphs(
        iterations=100, meta_batch_size=4, meta_lr=0.003, filters=32, queries=5, kernels="torch",
        test_tasks=60, eval_queries=5, log_every=50,
    )  # fmt: skip
    accuracy = {}
    for name in ("float32", "bf16"):
        train(config, tmp_path / name, precision=name)
        accuracy[name] = result(tmp_path / name)["accuracy"]
    assert min(accuracy.values()) > 0.75
    assert accuracy["bf16"] == pytest.approx(accuracy["float32"], abs=0.06)
