"""``--compile``: the same numbers, a warm second start, and a fallback that says so."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maml.config.cli import parse
from maml.config.presets import PRESETS, with_values
from maml.execution import compiled
from maml.execution.compiled import Compiled, choose
from maml.learners.maml import MAML
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.rules import OPTIMIZERS
from maml.trainer import Trainer
from maml.worker import Worker
from tests.launching import run, torchrun
from tests.metagradient.peer import assert_near
from tests.runs import glyphs, last, metrics, moved, same, sinusoid

CPU = torch.device("cpu")
# Compiling takes half a minute on an idle machine, and longer on a busy one.
PATIENT = pytest.mark.timeout(3600)
IDS = torch.tensor([3, 11, 12, 40, 7])


def compare(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the compiled meta-gradient equals the eager one, at new parameters."""
    plain = Worker(with_values(config, compile="off"), CPU)
    worker = Worker(with_values(config, compile="on"), CPU)
    worker.get_ready({len(IDS)})
    params = moved(plain)
    before = {name: tensor.clone() for name, tensor in params.items()}
    expected = plain.share(params, IDS, plain.learner)
    share = worker.share(params, IDS, worker.learner)
    said = capsys.readouterr().err
    assert "warning" not in said
    assert said.count("compiled in") == 1, "it was compiled before the first call, once"
    torch.testing.assert_close(share.totals, expected.totals, rtol=1e-10, atol=1e-10)
    assert_near(share.gradients, expected.gradients)
    assert same(params, before)


@PATIENT
@pytest.mark.slow  # The default suite compiles a small function: see `test_generated_code_is_kept`.
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (glyphs, {}),
        (sinusoid, {"inner_steps": 2}),
        (glyphs, {"network": "conv4-pool"}),
        (glyphs, {"meta_gradient": "mixed", "inner_steps": 2}),
        (sinusoid, {"meta_gradient": "mixed"}),
        (sinusoid, {"order": "first"}),
        (glyphs, {"network": "benchmarks.own_networks:RowsLSTM", "batching": "tasks"}),
        (glyphs, {"network": "benchmarks.own_networks:ViT", "batching": "tasks"}),
        *(
            (sinusoid, {"inner_optimizer": name, "inner_steps": 2})
            for name in OPTIMIZERS
            if name != "sgd"
        ),
    ],
)
def test_compiled_equals_eager(
    family: Any, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    compare(family(dtype="float64", kernels="torch", **changes), capsys)


@PATIENT
@pytest.mark.slow
@pytest.mark.parametrize("partition", ["exclusive", "chunk"])
def test_compiled_workers_train_the_same(tmp_path: Path, partition: str) -> None:
    args = [*RUN, "--meta-batch-size", "5", "--partition", partition]
    saved = []
    for mode in ("on", "off"):
        folder = tmp_path / mode
        done = run([*torchrun(2), *args, "--compile", mode, "--run-dir", str(folder)], timeout=400)
        assert "warning" not in done.stderr
        # Only rank 0 says it, here for the one shape that each process meets.
        assert done.stderr.count("compiled in") == (mode == "on")
        saved.append(last(folder)["model"])
    torch.testing.assert_close(*saved, rtol=0, atol=1e-10)


RUN = [
    "maml-sinusoid-10shot",
    *("--iterations", "3", "--meta-batch-size", "4", "--dtype", "float64", "--shots", "4"),
    *("--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
]  # fmt: skip


ONE_FUNCTION = """
import torch
from maml.execution.compiled import Compiled, inductor
x = torch.linspace(0, 1, 7, dtype=torch.float64)
print(Compiled(inductor)(lambda x: (2 * x).sin() * x.exp(), x).tolist())
"""


@PATIENT
def test_generated_code_is_kept(tmp_path: Path) -> None:
    """In $MAML_CACHE, for a second process; slow tests compile whole trainings."""
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no C++ compiler (g++ or clang++): inductor cannot build what it generates")
    # This compiler writes a line for each file that it compiles.
    compiler, log = tmp_path / "g++", tmp_path / "compiled"
    note = f'case "$*" in *.cpp*) echo "$*" >> {log};; esac'
    compiler.write_text(f'#!/bin/sh\n{note}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    env = {"MAML_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    x = torch.linspace(0, 1, 7, dtype=torch.float64)
    for is_first in (True, False):
        done = run([sys.executable, "-c", ONE_FUNCTION], timeout=400, env=env)
        assert "warning" not in done.stderr and done.stderr.count("compiled in") == 1
        found = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
        torch.testing.assert_close(found, (2 * x).sin() * x.exp(), rtol=1e-12, atol=1e-12)
        assert log.exists() == is_first
        log.unlink(missing_ok=True)


def test_without_a_compiler_a_run_says_so_and_is_the_same(tmp_path: Path) -> None:
    plain, folder = tmp_path / "off", tmp_path / "on"
    assert Trainer(parse([*RUN, "--compile", "off", "--run-dir", str(plain)])).run() == 0
    env = {"MAML_CACHE": str(tmp_path / "cache"), "CXX": str(tmp_path / "no-such-compiler")}
    # Not a fork: if inductor was imported before, it has its compiler already.
    args = [*RUN, "--compile", "on", "--run-dir", str(folder)]
    done = run([sys.executable, "-m", "train_maml", *args], timeout=400, env=env)
    began, ended = [line for line in done.stderr.splitlines() if line and "training:" not in line]
    assert began.startswith("--compile: compiling for tasks of [4, 1")
    assert ended.startswith("warning: --compile: ")
    assert ended.endswith("; computing without")
    assert same(last(folder)["model"], last(plain)["model"])
    assert metrics(folder)[-1]["iteration"] == 3


def test_auto_compiles_long_runs_of_what_kernels_do_not_serve() -> None:
    preset = PRESETS["maml-sinusoid-10shot"]
    short = with_values(preset, iterations=1000)
    assert choose(preset, CPU, in_torch=True) is not None
    assert choose(short, CPU, in_torch=True) is None
    assert choose(with_values(short, compile="on"), CPU, in_torch=True) is not None
    assert choose(with_values(preset, compile="off"), CPU, in_torch=True) is None
    assert choose(preset, CPU, in_torch=False) is None


def test_kernels_come_before_compilation() -> None:
    def ready(**changes: str) -> Worker:
        worker = Worker(glyphs(compile="on", filters=16, **changes), CPU)
        assert worker.compiled is None
        worker.get_ready(())
        return worker

    with_kernels = ready()
    if with_kernels.learner.obstacle(CPU) is not None:
        pytest.skip("no kernels here (no C++ compiler): nothing could come before compilation")
    assert with_kernels.compiled is None
    assert ready(kernels="torch").compiled is not None


def as_it_is(run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Any:
    return run


def test_nests_go_in_and_come_out() -> None:
    calls = []

    def function(a: dict[str, Tensor], b: tuple[Tensor, Tensor]) -> dict[str, Any]:
        calls.append(1)
        return {"sum": a["x"] + b[0], "nested": (b[1] * 2,)}

    compiled = Compiled(as_it_is, speaks=False)
    for factor in (1.0, 3.0, 5.0):
        x, y, z = factor * torch.ones(2), torch.arange(2.0), torch.tensor([4])
        found = compiled(function, {"x": x}, (y, z.expand(3)))
        assert found["sum"].tolist() == [factor, factor + 1]
        assert found["nested"][0].tolist() == [8, 8, 8]
    # Once to compare with and once to record; later calls use the recording.
    assert len(calls) == 2
    # Parameters in another order must not be taken for one another.
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    for params in ({"a": one, "b": two}, {"b": two, "a": one}):
        assert compiled(lambda p: p["a"] - 10 * p["b"], params).tolist() == [-19.0]


def test_shapes_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def stage(run: Any, inputs: Sequence[Tensor]) -> Any:
        made.append(inputs[0].shape)
        return run

    compiled_ = Compiled(stage, speaks=False)
    for size in [*range(1, 8), *range(1, 8)]:
        x = torch.arange(float(size))
        assert torch.equal(compiled_(lambda x: x * 3, x), x * 3)
    assert len(made) == compiled.SHAPES
    assert capsys.readouterr().err.count("warning: --compile: only 4 shapes") == 1


@pytest.mark.parametrize(
    ("function", "stage", "says"),
    [
        (torch.square, lambda run, inputs: 1 / 0, "division by zero"),
        (torch.square, lambda run, inputs: lambda *x: [1.5 * run(*x)[0]], "the result is off by"),
        (
            torch.square,
            lambda run, inputs: lambda *x: [run(*x)[0].float()],
            "torch.float32 .* torch.float64",
        ),
        (torch.square, lambda run, inputs: lambda *x: [run(*x)[0][:1]], r"\[1\], not .*\[3\]"),
        (torch.square, lambda run, inputs: lambda *x: [], "argument 2 is longer"),
        # A recording would always take the branch that it was recorded with.
        (lambda x: x * 2 if x.sum() > 0 else x * 5, as_it_is, "uses a tensor's value in Python"),
    ],
)
def test_what_fails_or_errs_is_computed_without_after_one_line(
    function: Any, stage: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = Compiled(stage)
    for size in (3, 3, -3, 4):
        x = torch.arange(1.0, abs(size) + 1, dtype=torch.float64) * size
        assert torch.equal(compiled(function, x), function(x))
    _, line = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"warning: --compile: .*{says}.*; computing without", line)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c: (0 * a, 0 * b, 0 * c),
        lambda a, b, c: (-0.5 * a, -0.5 * b, -0.5 * c),
        lambda a, b, c: (0.5 * a, 0.5 * b, 0.5 * c),
        lambda a, b, c: (a, 0 * b, c),
        lambda a, b, c: (a, a[:2], c),
    ],
    ids=["no gradient", "ascent", "half of it", "a small one lost", "another one's"],
)
def test_wrong_gradients_beside_right_losses_are_found(
    change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32; losses are a thousand times as large, and one gradient is only rounding."""

    def function(x: Tensor) -> OuterGradient:
        gradients = {"a": 1e-3 * x, "b": 1e-4 * x[:2], "c": 1e-9 * x}
        return OuterGradient(gradients, 10 + x, x, {})

    def compiled(x: Tensor, change: Any) -> OuterGradient:
        def stage(run: Any, inputs: Sequence[Tensor]) -> Any:
            return lambda *inputs: [*change(*run(*inputs)[:3]), *run(*inputs)[3:]]

        found: OuterGradient = Compiled(stage)(function, x)
        return found

    x = torch.arange(1.0, 6.0)
    spoilt = compiled(x, change)
    assert torch.equal(spoilt.gradients["b"], function(x).gradients["b"])
    assert "off by" in capsys.readouterr().err
    rounded = compiled(x, lambda a, b, c: (a, b, 2 * c))
    assert torch.equal(rounded.gradients["c"], 2 * function(x).gradients["c"])
    assert "computing without" not in capsys.readouterr().err


def test_an_error_of_the_function_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker(sinusoid(compile="on", dtype="float64"), CPU)
    worker.get_ready(())
    params = worker.learner.meta_parameters() | {"network.stray": torch.zeros(2)}
    with pytest.raises(Exception, match="not have been used"):
        worker.share(params, IDS, worker.learner)
    assert capsys.readouterr().err == ""


def test_tasks_one_by_one_are_recorded_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All threads call one recording of one task; a network that draws is not recorded."""
    monkeypatch.setattr(compiled, "inductor", as_it_is)
    own = "benchmarks.own_networks:ViT(dropout=0.1)"
    config = glyphs(dtype="float64", kernels="torch", batching="tasks")
    compare(config, capsys)
    drawing = Worker(with_values(config, network=own, batching="auto", compile="on"), CPU)
    drawing.get_ready(())
    assert drawing.learner.plan.draws and drawing.compiled is None


class Weighted(MAML):
    """A learner whose losses have a weight that is changed elsewhere."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return WEIGHT * self.criterion(outputs, y)


WEIGHT = 1.0


def test_a_global_that_a_learner_s_loss_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "inductor", as_it_is)
    config = sinusoid(learner=f"{__name__}:Weighted", dtype="float64")
    worker, plain = (Worker(with_values(config, compile=on), CPU) for on in ("on", "off"))
    worker.get_ready({len(IDS)})
    assert worker.compiled is not None
    for weight in (1.0, 2.0, 2.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "WEIGHT", weight)
        params = plain.learner.meta_parameters()
        found, expected = (each.share(params, IDS, each.learner) for each in (worker, plain))
        torch.testing.assert_close(found.totals, expected.totals, rtol=1e-10, atol=1e-10)
        assert_near(found.gradients, expected.gradients)


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAML_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "as before")
    x = torch.ones(2)
    assert torch.equal(Compiled(compiled.inductor)(lambda x: x * 2, x), 2 * x)
    _, line = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in line
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "as before"
