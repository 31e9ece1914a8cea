"""One definition of a meta-gradient: the same parameters whatever the strategy and world size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launching import run_torchrun, run_train

SEVEN_TASKS = [
    "maml-glyphs-5way-1shot",
    *("--iterations", "3", "--meta-batch-size", "7", "--inner-steps", "2"),
    *("--dtype", "float64", "--logger", "none", "--test-tasks", "0", "--eval-every", "0"),
]  # fmt: skip


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["iteration"] == 3
    model: dict[str, torch.Tensor] = saved["model"]
    return model


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run_dir = tmp_path_factory.mktemp("local")
    run_train([*SEVEN_TASKS, "--strategy", "local", "--run-dir", str(run_dir)], timeout=120)
    return parameters(run_dir)


@pytest.mark.parametrize("partition", ["exclusive", "chunk"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rpc_equals_local(
    local: dict[str, torch.Tensor], tmp_path: Path, world_size: int, partition: str
) -> None:
    """Seven tasks divide by no world size: a mean over workers would be biased."""
    args = [*SEVEN_TASKS, "--strategy", "rpc", "--partition", partition]
    run_torchrun(world_size, [*args, "--run-dir", str(tmp_path)], timeout=180)
    remote = parameters(tmp_path)
    assert remote.keys() == local.keys()
    for name, tensor in local.items():
        torch.testing.assert_close(remote[name], tensor, rtol=0, atol=1e-10, msg=name)


def test_training_moves_every_parameter(local: dict[str, torch.Tensor], tmp_path: Path) -> None:
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
