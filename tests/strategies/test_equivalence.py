"""One definition of a meta-gradient: the same parameters whatever the strategy and world size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.launching import run, run_torchrun, run_train, torchrun

SEVEN_TASKS = [
    "maml-glyphs-5way-1shot",
    *("--iterations", "3", "--meta-batch-size", "7", "--inner-steps", "2"),
    *("--dtype", "float64", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
]  # fmt: skip
SERVER = ["--strategy", "param-server"]
STRATEGIES = {
    "rpc exclusive": ["--strategy", "rpc", "--partition", "exclusive"],
    "rpc chunk": ["--strategy", "rpc", "--partition", "chunk"],
    "allreduce": ["--strategy", "allreduce", "--check-every", "1"],
    "param-server rpc": [*SERVER, "--ps-transport", "rpc"],
    "param-server collective": [*SERVER, "--ps-transport", "collective"],
}
BY_SIZE = {
    1: ["rpc exclusive", "allreduce"],
    # With one trainer there is no other whose update could come between.
    2: [*STRATEGIES, "param-server async"],
    3: [*STRATEGIES, "param-server backup"],
    5: [*STRATEGIES],
}
MODES = {
    "param-server async": [*SERVER, "--ps-mode", "async"],
    "param-server backup": [*SERVER, "--ps-mode", "backup", "--ps-backup-workers", "0"],
}
Parameters = dict[str, torch.Tensor]


def parameters(run_dir: Path) -> Parameters:
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["iteration"] == 3
    model: Parameters = saved["model"]
    return model


def assert_same(found: Parameters, expected: Parameters, what: str = "") -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    run_dir = tmp_path_factory.mktemp("local")
    run_train([*SEVEN_TASKS, "--strategy", "local", "--run-dir", str(run_dir)], timeout=120)
    return parameters(run_dir)


@pytest.mark.parametrize("world_size", BY_SIZE)
def test_equals_local(local: Parameters, tmp_path: Path, world_size: int) -> None:
    """Seven tasks divide by no world size: a mean over workers would be biased.

    One launch a world size: most of it is importing.
    """
    flags = STRATEGIES | MODES
    configurations = {name: [*SEVEN_TASKS, *flags[name]] for name in BY_SIZE[world_size]}
    script = ["-m", "tests.strategies.topologies"]
    command = [*torchrun(world_size, script), str(tmp_path), json.dumps(configurations)]
    run(command, timeout=240)
    for name in configurations:
        assert_same(parameters(tmp_path / name), local, name)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(3, []), (2, ["--ps-mode", "async"])],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_model_that_stays_on_the_server(
    local: Parameters, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """Launched as users do: torch's remote references work in one world a process."""
    args = [*SEVEN_TASKS, *SERVER, "--ps-forward", "remote", *flags, "--run-dir", str(tmp_path)]
    done = run_torchrun(world_size, args, timeout=180)
    assert "RPC agent" not in done.stderr, "left without saying goodbye"
    assert_same(parameters(tmp_path), local)


def test_training_moves_every_parameter(local: Parameters, tmp_path: Path) -> None:
    """Equality above would be empty if nothing trained."""
    untrained = [*SEVEN_TASKS, "--iterations", "0", "--run-dir", str(tmp_path)]
    run_train(untrained, timeout=120)
    start = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)["model"]
    for name, tensor in local.items():
        # A convolution's bias is cancelled by the normalisation after it: no gradient.
        if not name.endswith("conv.bias"):
            assert (tensor - start[name]).abs().max() > 1e-4, name


def test_a_classifier_is_the_same_classifier(tmp_path: Path) -> None:
    """Three mini-batches on two workers, each normalised by itself wherever it is."""
    common = [
        *("supervised-glyphs-lenet", "--network", "conv4", "--filters", "8", "--ways", "5"),
        *("--batch-size", "9", "--meta-batch-size", "3", "--iterations", "3"),
        *("--dtype", "float64", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
    ]
    run_train([*common, "--run-dir", str(tmp_path / "local")], timeout=120)
    away = ["--strategy", "rpc", "--partition", "chunk", "--run-dir", str(tmp_path / "rpc")]
    run_torchrun(2, [*common, *away], timeout=180)
    here, there = parameters(tmp_path / "local"), parameters(tmp_path / "rpc")
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=1e-10, msg=name)
