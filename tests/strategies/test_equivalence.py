"""One definition of a meta-gradient, and of an evaluation, whatever the strategy and world size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.launching import run, run_torchrun, run_train, torchrun
from tests.runs import metrics, result

# To validate on: fewer than five ranks, and than the four trainers of five; to test on: more than
# any number of ranks, and divided by none.
EVALUATED = ["--eval-every", "2", "--eval-tasks", "3", "--test-tasks", "7"]
SEVEN_TASKS = [
    "maml-glyphs-5way-1shot",
    *("--iterations", "3", "--meta-batch-size", "7", "--inner-steps", "2"),
    *("--dtype", "float64", "--logger", "none", *EVALUATED),
]
TOPOLOGIES = ["-m", "tests.strategies.topologies"]
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
# What a clock says, what was sent, and what was asked for.
OF_THE_TOPOLOGY = (
    "changed",
    *("seconds", "tasks_per_second", "reduce_seconds", "server_seconds"),
    *("wire_bytes", "link_bytes", "dropped", "staleness"),
)
Tensors = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """What a run is for: its parameters, and what it says of itself, by where that is."""

    parameters: Tensors
    said: dict[str, Any]


def trained(run_dir: Path) -> Trained:
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["iteration"] == 3
    rows = {f"{row.get('split', 'train')} {row['iteration']}": row for row in metrics(run_dir)}
    assert rows.keys() == {"validation 2", "train 3"}
    said = {
        f"{where}: {name}": value
        for where, row in (rows | {"result": result(run_dir)}).items()
        for name, value in row.items()
        if name not in OF_THE_TOPOLOGY
    }
    return Trained(saved["model"], said)


def assert_same(found: Trained, expected: Trained, what: str = "") -> None:
    assert_close(found.parameters, expected.parameters, what)
    assert found.said.keys() == expected.said.keys(), what
    for name, value in expected.said.items():
        if isinstance(value, float):
            value = pytest.approx(value, rel=0, abs=1e-10)
        assert found.said[name] == value, f"{what}, {name}"


def assert_close(found: Tensors, expected: Tensors, what: str = "") -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def evaluations(run_dir: Path) -> Tensors:
    """A row for every task, of each split, where `tests.strategies.topologies` has trained."""
    rows: Tensors = torch.load(run_dir / "rows.pt", weights_only=True)
    return rows


@pytest.fixture(scope="module")
def local_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    configuration = json.dumps({"local": [*SEVEN_TASKS, "--strategy", "local"]})
    run([sys.executable, *TOPOLOGIES, str(folder), configuration], timeout=120)
    return folder / "local"


@pytest.fixture(scope="module")
def local(local_dir: Path) -> Trained:
    return trained(local_dir)


@pytest.mark.parametrize("world_size", BY_SIZE)
def test_equals_local(local: Trained, local_dir: Path, tmp_path: Path, world_size: int) -> None:
    """Seven tasks divide by no world size: a mean over workers would be biased.

    One launch a world size: most of it is importing.
    """
    flags = STRATEGIES | MODES
    configurations = {name: [*SEVEN_TASKS, *flags[name]] for name in BY_SIZE[world_size]}
    command = [*torchrun(world_size, TOPOLOGIES), str(tmp_path), json.dumps(configurations)]
    run(command, timeout=240)
    for name in configurations:
        assert_same(trained(tmp_path / name), local, name)
        # Means do not know the order of tasks; rows do.
        assert_close(evaluations(tmp_path / name), evaluations(local_dir), name)


def test_tasks_are_told_apart(local: Trained, local_dir: Path) -> None:
    """Equality above would be empty if all tasks had the same metrics."""
    rows = evaluations(local_dir)
    assert {split: len(of) for split, of in rows.items()} == {"validation": 3, "test": 7}
    losses = rows["test"][:, 0]
    assert (losses[:, None] - losses).abs().fill_diagonal_(1).min() > 1e-4
    # The rows are what the numbers are of.
    assert local.said["result: loss"] == pytest.approx(losses.mean().item(), rel=1e-12)
    validated = rows["validation"][:, 0].mean().item()
    assert local.said["validation 2: loss"] == pytest.approx(validated, rel=1e-12)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(3, []), (2, ["--ps-mode", "async"])],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_model_that_stays_on_the_server(
    local: Trained, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """Launched as users do: torch's remote references work in one world a process."""
    args = [*SEVEN_TASKS, *SERVER, "--ps-forward", "remote", *flags, "--run-dir", str(tmp_path)]
    done = run_torchrun(world_size, args, timeout=180)
    assert "RPC agent" not in done.stderr, "left without saying goodbye"
    assert_same(trained(tmp_path), local)


def test_training_moves_every_parameter(local: Trained, tmp_path: Path) -> None:
    """Equality above would be empty if nothing trained."""
    untrained = [*SEVEN_TASKS, "--iterations", "0", "--run-dir", str(tmp_path)]
    run_train(untrained, timeout=120)
    start = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)["model"]
    for name, tensor in local.parameters.items():
        # A convolution's bias is cancelled by the normalisation after it: no gradient.
        if not name.endswith("conv.bias"):
            assert (tensor - start[name]).abs().max() > 1e-4, name


def check_another_learner(name: str, folder: Path) -> Trained:
    """Train it in four topologies; return what it comes to in each."""
    flags = [*SEVEN_TASKS, "--learner", name]
    names = ("rpc exclusive", "rpc chunk", "allreduce", "param-server rpc")
    configurations = {name: [*flags, *STRATEGIES[name]] for name in names}
    run_train([*flags, "--run-dir", str(folder / "local")], timeout=120)
    run([*torchrun(3, TOPOLOGIES), str(folder), json.dumps(configurations)], timeout=240)
    expected = trained(folder / "local")
    for name in names:
        assert_same(trained(folder / name), expected, name)
    return expected


def test_a_learner_of_other_parameters(tmp_path: Path) -> None:
    """Meta-SGD's rates are no weights of the network: whatever is learned travels and is summed."""
    found = check_another_learner("metasgd", tmp_path)
    rates = {k: t for k, t in found.parameters.items() if k.startswith("rates.")}
    assert len(rates) == len(found.parameters) / 2
    # They have moved, each another way; but for those of biases that normalisation takes away.
    assert all(len(t.unique()) > 1 for k, t in rates.items() if not k.endswith("conv.bias"))


def test_a_learner_that_solves(local: Trained, tmp_path: Path) -> None:
    """IMAML's steps of conjugate gradient are each task's own, whoever else is in its batch."""
    found = check_another_learner("imaml", tmp_path)
    head = "network.head.weight"
    assert (found.parameters[head] - local.parameters[head]).abs().max() > 1e-4


def test_a_classifier_is_the_same_classifier(tmp_path: Path) -> None:
    """Three mini-batches on two workers, each normalised by itself wherever it is."""
    common = [
        *("supervised-glyphs-lenet", "--network", "conv4", "--filters", "8", "--ways", "5"),
        *("--batch-size", "9", "--meta-batch-size", "3", "--iterations", "3"),
        *("--dtype", "float64", "--logger", "none", *EVALUATED),
    ]
    run_train([*common, "--run-dir", str(tmp_path / "local")], timeout=120)
    away = ["--strategy", "rpc", "--partition", "chunk", "--run-dir", str(tmp_path / "rpc")]
    run_torchrun(2, [*common, *away], timeout=180)
    assert_same(trained(tmp_path / "rpc"), trained(tmp_path / "local"))
