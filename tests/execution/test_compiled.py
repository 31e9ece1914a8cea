"""``--compile``: the same numbers, a warm second start, and a fallback that says so."""

import errno
import json
import os
import re
import shutil
import stat
import sys
from collections import Counter
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
from maml.metagradient.differentiate import OuterGradient
from maml.processes.world import World
from maml.strategies.rpc import EXCLUSIVE, Rpc, chunk_partitioner
from maml.trainer import Trainer
from maml.worker import Worker
from tests.launching import Completed, run, run_train
from tests.runs import glyphs, last, name_of, same, sinusoid
from tests.workers import moved

CPU = torch.device("cpu")
# Compiling takes half a minute of an idle machine, and as much more as others leave of it.
PATIENT = pytest.mark.timeout(3600)
IDS = torch.tensor([3, 11, 12, 40, 7])


@PATIENT
@pytest.mark.slow  # What is compiled by a command, below, is of the default suite.
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (glyphs, {}),
        (sinusoid, {"inner_steps": 2, "inner_optimizer": "adam"}),
        (glyphs, {"meta_gradient": "mixed", "inner_steps": 2}),
        (sinusoid, {"order": "first"}),
    ],
    ids=name_of,
)
def test_compiled_equals_eager(
    family: Any, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """At other parameters than it saw before."""
    config = family(dtype="float64", kernels="torch", **changes)
    plain = Worker(with_values(config, compile="off"), CPU)
    worker = Worker(with_values(config, compile="on"), CPU)
    worker.get_ready({len(IDS)})
    params = moved(plain)
    expected = plain.share(params, IDS, plain.learner)
    share = worker.share(params, IDS, worker.learner)
    said = capsys.readouterr().err
    assert "warning" not in said
    assert said.count("--compile:") == 1, "it was compiled before the first call, once"
    torch.testing.assert_close(share.totals, expected.totals, rtol=1e-10, atol=1e-10)
    for name, gradient in expected.gradients.items():
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(share.gradients[name], gradient, rtol=0, atol=1e-10 * scale)


# ---- as a user runs it ------------------------------------------------------------------------

RUN = [
    "maml-sinusoid-10shot",
    *("--iterations", "3", "--meta-batch-size", "4", "--dtype", "float64", "--shots", "4"),
    *("--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
]  # fmt: skip


def train(folder: Path, mode: str, **env: str) -> Completed:
    args = [*RUN, "--compile", mode, "--run-dir", str(folder)]
    return run_train(args, timeout=400, env=env)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What `RUN` trains without compiling."""
    folder = tmp_path_factory.mktemp("plain")
    assert Trainer(parse([*RUN, "--compile", "off", "--run-dir", str(folder)])).run() == 0
    return last(folder)["model"]


def counting_compiler(folder: Path) -> tuple[Path, Path]:
    """Return a C++ compiler that writes a line for each file that it compiles, and the lines."""
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no C++ compiler (g++ or clang++): inductor cannot build what it generates")
    script, log = folder / "g++", folder / "compiled"
    note = f'case "$*" in *.cpp*) echo "$*" >> {log};; esac'
    script.write_text(f'#!/bin/sh\n{note}\nexec {real} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script, log


ONE_FUNCTION = """
import torch
from maml.execution.compiled import Compiled, inductor
x = torch.linspace(0, 1, 7, dtype=torch.float64)
print(Compiled(inductor)(lambda x: (2 * x).sin() * x.exp(), x).tolist())
"""


@PATIENT
def test_generated_code_is_kept(tmp_path: Path) -> None:
    """In $MAML_CACHE, for a second process; a whole training's code is of the slow tests."""
    compiler, log = counting_compiler(tmp_path)
    env = {"MAML_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    x = torch.linspace(0, 1, 7, dtype=torch.float64)
    for is_first in (True, False):
        done = run([sys.executable, "-c", ONE_FUNCTION], timeout=400, env=env)
        assert "warning" not in done.stderr and done.stderr.count("--compile:") == 1
        found = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
        torch.testing.assert_close(found, (2 * x).sin() * x.exp(), rtol=1e-12, atol=1e-12)
        assert log.exists() == is_first
        log.unlink(missing_ok=True)


def test_without_a_compiler_a_run_says_so_and_is_the_same(
    tmp_path: Path, plain: dict[str, Tensor]
) -> None:
    env = {"MAML_CACHE": str(tmp_path / "cache"), "CXX": str(tmp_path / "no-such-compiler")}
    done = train(tmp_path / "on", "on", **env)
    said = [line for line in done.stderr.splitlines() if line and "training:" not in line]
    assert len(said) == 1, said
    assert said[0].startswith("warning: --compile: ")
    assert said[0].endswith("; computing without")
    assert same(last(tmp_path / "on")["model"], plain)


# ---- which runs compile -----------------------------------------------------------------------


def test_auto_compiles_long_runs_of_what_kernels_do_not_serve() -> None:
    preset = PRESETS["maml-sinusoid-10shot"]
    short = with_values(preset, iterations=1000)
    assert choose(preset, CPU, in_torch=True) is not None
    assert choose(short, CPU, in_torch=True) is None
    assert choose(with_values(short, compile="on"), CPU, in_torch=True) is not None
    assert choose(with_values(preset, compile="off"), CPU, in_torch=True) is None
    assert choose(preset, CPU, in_torch=False) is None


@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_get_ready_for_the_shares_they_are_sent(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torchopt.distributed", "torchopt.distributed.api"):
        monkeypatch.setattr(f"{module}.get_world_size", lambda: world_size)
    config = sinusoid(meta_batch_size=7, partition="chunk")
    worker = Worker(config, CPU)
    ids = torch.arange(7)
    own = Rpc(config, World(0, world_size, 0, world_size, launched=True), worker)._own(ids)
    sent = {rank: len(args[0]) for rank, args, _ in chunk_partitioner(ids[len(own) :])}
    sent[0] = len(own)
    assert sum(sent.values()) == 7
    # Exclusively, too: a call a task, but those of a worker are computed together.
    called = Counter(rank for rank, *_ in EXCLUSIVE(ids))
    assert called == sent
    for rank in range(world_size):
        world = World(rank, world_size, rank, world_size, launched=True)
        assert Rpc(config, world, worker).share_sizes() == {sent[rank]}


# ---- Compiled, with stages that cost nothing --------------------------------------------------


def as_it_is(run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Any:
    return run


def test_nests_go_in_and_come_out() -> None:
    """Parameters in another order must not be taken for one another."""
    compiled = Compiled(as_it_is, speaks=False)
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    for params in ({"a": one, "b": two}, {"b": two, "a": one}):
        found = compiled(lambda p: {"difference": (p["a"] - 10 * p["b"],)}, params)
        assert found["difference"][0].tolist() == [-19.0]


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (lambda run, inputs: 1 / 0, "division by zero"),
        (lambda run, inputs: lambda *x: [1.5 * run(*x)[0]], "the result is off by"),
        (lambda run, inputs: lambda *x: [run(*x)[0][:1]], r"\[1\] came for .*\[3\]"),
    ],
)
def test_a_stage_that_fails_or_errs_is_one_line(
    stage: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = Compiled(stage)
    for size in (3, 3, 4):
        x = torch.arange(1.0, size + 1, dtype=torch.float64)
        assert torch.equal(compiled(lambda x: x.square(), x), x.square())
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"warning: --compile: .*{says}.*; computing without", line)


def _spoil(change: Callable[[dict[str, Tensor]], None]) -> Any:
    """A stage whose run changes the gradients, of which the others are its losses."""

    def stage(run: Any, inputs: Sequence[Tensor]) -> Any:
        def spoilt(*inputs: Tensor) -> list[Tensor]:
            *gradients, losses, outputs, end = run(*inputs)
            named = dict(zip("abc", gradients, strict=True))
            change(named)
            return [*named.values(), losses, outputs, end]

        return spoilt

    return stage


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.update({name: -0.5 * tensor for name, tensor in g.items()}),
        lambda g: g.update(b=0 * g["b"]),
    ],
    ids=["ascent", "a small one lost"],
)
def test_wrong_gradients_beside_right_losses_are_found(
    change: Callable[[dict[str, Tensor]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32, where losses are a thousand times as large, and one gradient is rounding."""

    def function(x: Tensor) -> OuterGradient:
        gradients = {"a": 1e-3 * x, "b": 1e-4 * x[:2], "c": 1e-9 * x}
        return OuterGradient(gradients, 10 + x, x, {})

    x = torch.arange(1.0, 6.0)
    spoilt = Compiled(_spoil(change))(function, x)
    assert torch.equal(spoilt.gradients["b"], function(x).gradients["b"])
    assert "off by" in capsys.readouterr().err
    rounded = Compiled(_spoil(lambda g: g.update(c=2 * g["c"])))(function, x)
    assert torch.equal(rounded.gradients["c"], 2 * function(x).gradients["c"])
    assert "computing without" not in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAML_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "as before")
    x = torch.ones(2)
    assert torch.equal(Compiled(compiled.inductor)(lambda x: x * 2, x), 2 * x)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in line
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "as before"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler leaves the file that it could not write."""
    monkeypatch.setenv("MAML_CACHE", str(tmp_path))

    def stage(run: object, inputs: object) -> None:
        from torch._inductor.codecache import write_atomic

        with monkeypatch.context() as patched:
            patched.setattr("pathlib.Path.rename", full)
            write_atomic(str(tmp_path / "compiled" / "ab" / "abc.cpp"), "code", make_dirs=True)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    x = torch.ones(2)
    assert torch.equal(Compiled(stage)(lambda x: x * 2, x), 2 * x)
    found = [path.name for path in (tmp_path / "compiled").rglob("*") if path.is_file()]
    assert found == ["lock"]
