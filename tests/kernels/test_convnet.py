"""The compiled kernels equal the network that they replace, and a run works without them."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from datasets.tasks import Task
from maml.kernels import library, threads
from maml.kernels.convnet import convnet
from maml.learners.objectives import CLASSIFICATION
from maml.metagradient.function import Derivatives
from maml.metagradient.native import NativeDerivatives
from maml.metagradient.problem import Problem
from maml.networks.conv4 import Conv4
from tests.compiler import needs_compiler
from tests.launching import run
from tests.metagradient.peer import assert_near, losses_of

pytestmark = needs_compiler


def random_case(
    image_shape: tuple[int, int, int], ways: int, examples: int, filters: int, kind: str, n: int
) -> tuple[Conv4, dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """A network, weights and a vector of ``n`` tasks, and their sets, in float64."""
    torch.manual_seed(3)
    pool, mean = kind == "pooled", kind == "mean"
    leak = 0.01 if pool else 0.0  # MAML++'s leaky ReLU in pooled cases, a ReLU in strided ones
    network = Conv4(image_shape, ways, filters=filters, pool=pool, mean=mean, leak=leak).double()
    weights = {
        name: p.detach() + 0.1 * torch.randn(n, *p.shape, dtype=p.dtype)
        for name, p in network.named_parameters()
    }
    for i in range(len(network.blocks)):
        # At a negative scale the pooling takes the smallest pixel; at zero, the first.
        weights[f"blocks.{i}.norm.weight"][:, ::3] *= -1
        weights[f"blocks.{i}.norm.weight"][:, 1] = 0
    vector = {name: torch.randn_like(w) for name, w in weights.items()}
    x = torch.rand(n, examples, *image_shape, dtype=torch.float64)
    return network, weights, vector, x, torch.randint(ways, (n, examples))


def problem_of(network: Conv4) -> Problem:
    losses = losses_of(
        lambda at, x, _: torch.func.functional_call(network, at, (x,))[0], CLASSIFICATION.loss
    )
    return Problem(dict(network.named_parameters()), **losses)


CASES = {
    "omniglot": ((1, 28, 28), 20, 20, 64, "mean"),
    "odd image": ((2, 19, 23), 3, 4, 8, "mean"),
    "odd flat": ((2, 35, 23), 3, 4, 24, "flat"),
    "miniimagenet": ((3, 84, 84), 5, 6, 32, "pooled"),
    "odd pooling": ((3, 37, 21), 4, 7, 16, "pooled"),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradient_and_hessian_equal_autograd(case: str, shared: bool) -> None:
    """For the plain cross-entropy, including the head; shared weights are read by many threads."""
    torch.set_num_threads(1 + 3 * shared)
    network, weights, vector, x, y = random_case(*CASES[case], n=3)
    problem = problem_of(network)
    compiled, reference = NativeDerivatives(problem, network), Derivatives(problem)
    if shared:
        weights = {name: w[0].expand(3, *w.shape[1:]) for name, w in weights.items()}
    network.kernels = False
    tasks = Task(x, y, x, y)
    expected = reference.gradient("support", weights, tasks, 0, again=True)
    for total in (False, True):
        found = compiled.gradient("support", weights, tasks, 0, again=True)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-10, atol=1e-11)
        assert_near(found.gradients, expected.gradients)
        wanted = reference.hessian_vector(expected.point, vector, total=total, again=True)
        for _ in range(2):  # a point can be used many times
            assert_near(compiled.hessian_vector(found.point, vector, total=total), wanted)


def test_memory_serves_again_when_no_tensor_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_LARGE", 0)
    monkeypatch.setattr(threads, "_spare", [])
    first, second = (threads.lent(torch.float64, 2, 5) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    view, place = first[1:], first.data_ptr()
    del first
    third = threads.lent(torch.float64, 2, 5)
    assert third.data_ptr() != place
    del view
    assert threads.lent(torch.float64, 2, 5).data_ptr() == place
    assert threads.lent(torch.float64, 3, 5).shape == (3, 5)


@pytest.mark.parametrize("label", [4, -1, 2**32])
def test_a_label_outside_the_ways_is_an_error(label: int) -> None:
    network, weights, _, x, y = random_case(*CASES["odd pooling"], n=3)
    loss = NativeDerivatives(problem_of(network), network)
    y[2, 3] = label
    with pytest.raises(ValueError, match=rf"label {label} is none of 0 to 3 \(4 ways\)"):
        loss.gradient("query", weights, Task(x, y, x, y), 0, again=False)


def test_tensors_that_do_not_fit_are_an_error() -> None:
    """Else the kernels would read beyond a tensor's end, or as another dtype."""
    network, weights, _, x, y = random_case(*CASES["odd image"], n=2)
    passes = convnet(network.shape(network.ways))
    at = of_kernels(weights)
    _, statistics = passes.outputs(at, x, None)
    for message, call in (
        ("images", lambda: passes.features(at, x[..., :-1])),
        ("images", lambda: passes.outputs(at, x.half(), None)),
        ("images", lambda: passes.outputs(at, x[:, :0], None)),
        ("weights", lambda: passes.features(at, x.float())),
        ("a weight is", lambda: passes.features([at[0][..., :-1], *at[1:]], x)),
        ("labels", lambda: passes.gradient(at, x, y[:, :-1], again=False)),
        ("labels", lambda: passes.gradient(at, x, y.int(), again=False)),
        ("statistics", lambda: passes.outputs(at, x, statistics[:, :-1])),
        ("statistics", lambda: passes.outputs(at, x, statistics.float())),
    ):
        with pytest.raises(ValueError, match=message):
            call()  # type: ignore[no-untyped-call]


def test_what_determines_the_kernels_compiles_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's version, its options, and every source file."""
    compiler = tmp_path / "compiler"
    names: list[str] = []
    for version in ("1.0", "2.0", "2.0"):
        compiler.write_text(f"#!/bin/sh\necho compiler {version}\n")
        compiler.chmod(0o755)
        names.append(library._identity(str(compiler)))
    assert names[0] != names[1] == names[2]
    shutil.copytree(library.FOLDER, tmp_path / "src")
    monkeypatch.setattr(library, "FOLDER", tmp_path / "src")
    assert library._identity(str(compiler)) == names[1]
    (tmp_path / "src" / "head.h").write_text("// another")
    names.append(library._identity(str(compiler)))
    monkeypatch.setenv("MAML_KERNEL_FLAGS", "-O1")
    names.append(library._identity(str(compiler)))
    assert len(set(names)) == 4


def of_kernels(weights: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for name, tensor in weights.items() if not name.endswith("conv.bias")]


@pytest.mark.parametrize("case", CASES)
def test_threads_of_one_task_change_no_bit(case: str) -> None:
    """Also with three threads, which divide the channels unevenly."""
    network, weights, vector, x, y = random_case(*CASES[case], n=1)
    loss, tasks = NativeDerivatives(problem_of(network), network), Task(x, y, x, y)
    passes = convnet(network.shape())
    *at, _, _ = of_kernels(weights)
    *v, _, _ = of_kernels(vector)

    def results(n_threads: int) -> list[Tensor]:
        torch.set_num_threads(n_threads)
        found = loss.gradient("query", weights, tasks, 0, again=True)
        product = loss.hessian_vector(found.point, vector, total=True)
        features, used, kept = passes.features(at, x)
        gradients, back = passes.pull_back(at, kept, features, total=False, again=True)
        assert back is not None
        by_cotangent, beside, _ = passes.along(at, kept, back, v, x.shape[1], total=False)
        again, _ = passes.pull_back(at, kept, by_cotangent, beside, total=False)
        outputs = [*passes.outputs(at, x, None), passes.outputs(at, x, used)[0]]
        summed = [found.losses, found.outputs, *found.gradients.values(), *product.values()]
        return [*summed, features, used, *gradients, by_cotangent, *again, *outputs]

    alone = results(1)
    for n_threads in (2, 3, 8):
        for found, wanted in zip(results(n_threads), alone, strict=True):
            assert torch.equal(found, wanted)


def test_divergence_stays_visible() -> None:
    """A loss of NaN stays NaN."""
    network, weights, _, x, y = random_case(*CASES["odd image"], n=2)
    weights["head.weight"][1, 0, 0] = float("nan")
    loss, tasks = NativeDerivatives(problem_of(network), network), Task(x, y, x, y)
    losses = loss.gradient("query", weights, tasks, 0, again=False).losses
    assert losses[0].isfinite() and losses[1].isnan()


def test_without_a_compiler_training_goes_on(tmp_path: Path, cache_dir: Path) -> None:
    """Without a compiler torch computes; only ``--kernels native`` ends in a one-line error."""
    env = {"CXX": "/nonexistent/compiler", "MAML_CACHE": str(cache_dir)}
    words = ["maml-glyphs-5way-1shot", "--iterations", "1", "--meta-batch-size", "2"]
    words += ["--logger", "none", "--test-tasks", "0", "--eval-every", "0", "--run-dir"]
    command = [sys.executable, "train_maml.py", *words]
    run([*command, str(tmp_path / "auto")], timeout=120, env=env)
    insists = [*command, str(tmp_path / "native"), "--kernels", "native"]
    done = run(insists, timeout=120, env=env, expect=2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: --kernels native: the kernels could not be compiled")
