"""Graph capture: its bookkeeping anywhere, the capture itself where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maml.config.presets import with_values
from maml.execution.compiled import Compiled, choose, stages
from maml.execution.cuda_graph import Capture
from maml.learners import build_learner
from maml.metagradient.optimizers import OPTIMIZERS
from maml.worker import Worker
from tests.runs import glyphs, name_of, sinusoid

CPU = torch.device("cpu")


class Replayer:
    """Captures on the CPU: a replay runs again, over the same buffers, into the same outputs."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(
        self, run: Callable[[], Sequence[Tensor]]
    ) -> tuple[Callable[[], object], Sequence[Tensor]]:
        self.captures += 1
        outputs = run()

        def replay() -> None:
            self.replays += 1
            for output, new in zip(outputs, run(), strict=True):
                output.copy_(new)

        return replay, outputs


def test_inputs_are_copied_in_and_outputs_out() -> None:
    recorder = Replayer()
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3, 4])
    replayed = Capture(CPU, recorder)(lambda a, b: [a + b, a * 2], [x, y])
    first = replayed(x, y)
    second = replayed(torch.tensor([5.0, 6.0]), torch.tensor([1, 1]))
    assert [t.tolist() for t in first] == [[4.0, 6.0], [2.0, 4.0]], "overwritten by the next replay"
    assert [t.tolist() for t in second] == [[6.0, 7.0], [10.0, 12.0]]
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0], [3, 4]), "a caller's tensor was written to"
    assert (recorder.captures, recorder.replays) == (1, 2)


@pytest.mark.parametrize("family", [sinusoid, glyphs])
def test_a_worker_replays_each_shape(family: Callable[..., object]) -> None:
    """Five tasks in batches of two: two shapes, two captures, and the same sums as without."""
    config = family(dtype="float64", kernels="torch", task_batch=2)
    plain, captured = Worker(config, CPU), Worker(config, CPU)
    recorder = Replayer()
    captured.compiled = Compiled([Capture(CPU, recorder)])
    generator = torch.Generator().manual_seed(0)
    start = plain.learner.meta_parameters()
    for ids in (torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6, 5, 3])):
        params = {
            name: tensor + 0.1 * torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
            for name, tensor in start.items()
        }
        expected = plain.share(params, ids, plain.learner)
        share = captured.share(params, ids, captured.learner)
        torch.testing.assert_close(share.totals, expected.totals, rtol=0, atol=1e-10)
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(share.gradients[name], gradient, rtol=0, atol=1e-10)
    assert recorder.captures == 2
    # Once to compare when it is captured, and once for each of the three batches of each call.
    assert recorder.replays == 2 + 6


def test_a_failed_capture_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        captures = 0

        def capture(self, run: object) -> tuple[Callable[[], object], Sequence[Tensor]]:
            self.captures += 1
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    failing = Failing()
    compiled = Compiled([Capture(CPU, failing)])
    for shape in (2, 3, 2):
        x = torch.arange(float(shape))
        assert torch.equal(compiled(lambda x: x + 1, x), x + 1)
    line = "warning: --compile: operation not permitted when stream is capturing; computing without"
    assert capsys.readouterr().err.splitlines() == [line]
    assert failing.captures == 1


class Watch(TorchDispatchMode):
    """Collects operations that touch the CPU, or ask for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.strays: set[str] = set()

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        outputs = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for leaf in pytree.tree_leaves((args, kwargs, outputs)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self.strays.add(str(func))
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.strays.add(str(func))
        return outputs


@pytest.mark.parametrize(
    ("family", "changes", "meta_gradient"),
    [
        (sinusoid, {}, "mixed"),
        (glyphs, {}, "reverse"),
        (glyphs, {}, "mixed"),
        (glyphs, {"network": "conv4-pool"}, "mixed"),
        (glyphs, {"order": "first"}, "mixed"),
        (glyphs, {"inner_optimizer": "adam", "inner_steps": 2}, "reverse"),
        # The rules are the same code for any network.
        *((sinusoid, {"inner_optimizer": name, "inner_steps": 2}, "mixed") for name in OPTIMIZERS),
    ],
    ids=name_of,
)
def test_a_meta_gradient_stays_on_its_device(
    family: Callable[..., object], changes: dict[str, object], meta_gradient: str
) -> None:
    """What a capture refuses and what makes a GPU wait, seen without one: on the meta device, where
    tensors have no values, every operation must have its operands there.
    """
    config = family(kernels="torch", meta_gradient=meta_gradient, **changes)
    worker = Worker(config, CPU)
    tasks = worker.training.tasks(torch.arange(3))
    params = {name: p.detach() for name, p in worker.learner.meta_parameters().items()}
    params, tasks = pytree.tree_map(lambda x: torch.empty_like(x, device="meta"), (params, tasks))
    with Watch() as watch:
        worker.learner.outer_gradient(params, tasks)
    assert watch.strays == set()


def test_the_watch_sees_strays() -> None:
    x = torch.ones(2, device="meta")
    with Watch() as watch:
        torch.zeros(2).to("meta") + x
    assert watch.strays


def test_what_is_captured() -> None:
    gpu = torch.device("cuda", 0)
    for mode, expected in {"off": [], "auto": ["Capture"], "on": ["function", "Capture"]}.items():
        config = glyphs(compile=mode)
        found = [type(stage).__name__ for stage in stages(config, gpu, in_torch=True)]
        assert found == expected
        assert stages(config, gpu, in_torch=False) == []
    # The kernels are the CPU's; another device is at hand everywhere.
    assert build_learner(glyphs()).in_torch(torch.device("meta"))
    assert choose(glyphs(compile="on"), gpu, in_torch=False) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("family", [sinusoid, glyphs])
def test_a_graph_equals_eager(
    family: Callable[..., object], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = family(dtype="float64", task_batch=2)
    device = torch.device("cuda", 0)
    plain = Worker(with_values(config, compile="off"), device)
    captured = Worker(with_values(config, compile=mode), device)
    captured.get_ready({5})
    params = plain.learner.meta_parameters()
    for first in (0, 7):
        ids = torch.arange(first, first + 5)
        expected = plain.share(params, ids, plain.learner)
        share = captured.share(params, ids, captured.learner)
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(share.gradients[name], gradient, rtol=0, atol=1e-10)
    assert "warning" not in capsys.readouterr().err
