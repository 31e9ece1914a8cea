"""One definition of a meta-gradient, and of an evaluation, whatever the strategy and world size."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.launching import run, torchrun
from tests.runs import metrics, result
from tests.strategies.faults import ALL, IN_ORDER

# Three validation tasks are fewer than five ranks and their four trainers. Seven test tasks are
# more than the ranks of any world, and no world size above one divides them.
EVALUATED = ["--eval-every", "2", "--eval-tasks", "3", "--test-tasks", "7"]
NO_LOOP = [
    *("maml-glyphs-5way-1shot", "--filters", "16"),
    *("--iterations", "3", "--meta-batch-size", "7"),
    *("--dtype", "float64", "--logger", "none", *EVALUATED),
]
SEVEN_TASKS = [*NO_LOOP, "--inner-steps", "2"]
TOPOLOGIES = ["-m", "tests.strategies.topologies"]
WAYS = ALL | {
    "param-server backup": [*ALL["param-server backup"], "--ps-backup-workers", "0"],
    "param-server async remote": [*ALL["param-server async"], "--ps-forward", "remote"],
}
# The learners. Each is compared with a run of one process.
LEARNERS = {
    "local": SEVEN_TASKS,
    # The test takes the best validated model, that of the second of three iterations.
    "metasgd": [*SEVEN_TASKS, "--learner", "metasgd", "--test-model", "best"],
    "imaml": [*SEVEN_TASKS, "--learner", "imaml"],
    # Its second iteration is in another epoch; a task's id tells its epoch.
    "mamlpp": [
        *(*SEVEN_TASKS, "--learner", "mamlpp", "--network", "conv4-pool", "--leak", "0.01"),
        *("--msl-epochs", "2", "--first-order-epochs", "1", "--iterations-per-epoch", "1"),
        *("--meta-schedule", "cosine"),
    ],
    "reptile": [
        *(*SEVEN_TASKS, "--learner", "reptile", "--inner-batch", "3"),
        *("--inner-optimizer", "adam0", "--keep-moment", "--inner-lr", "0.01"),
        *("--meta-optimizer", "sgd"),
        *("--meta-schedule", "linear", "--meta-lr", "0.5", "--train-shots", "2"),
    ],
    "protonet": [*NO_LOOP, "--learner", "protonet", "--train-ways", "7"],
    "r2d2": [*NO_LOOP, "--learner", "r2d2"],
    "cavia": [*SEVEN_TASKS, "--learner", "cavia", "--context", "5"],
    "metacurv": [*SEVEN_TASKS, "--learner", "metacurv"],
    "boil": [*SEVEN_TASKS, "--learner", "boil"],
    "noadapt": [*NO_LOOP, "--learner", "noadapt"],
    "finetune": [*NO_LOOP, "--learner", "finetune", "--train-ways", "800"],
    # Three mini-batches, each normalised by itself wherever it is.
    "supervised": [
        *("supervised-glyphs-lenet", "--network", "conv4", "--filters", "8", "--ways", "5"),
        *("--batch-size", "9", "--meta-batch-size", "3", "--iterations", "3"),
        *("--dtype", "float64", "--logger", "none", *EVALUATED),
    ],
}
LEARNERS["sinusoid"] = [
    *("maml-sinusoid-10shot", "--shots", "5", "--queries", "7", "--meta-batch-size", "7"),
    *("--inner-steps", "2", "--iterations", "3", "--compile", "off"),
    *("--dtype", "float64", "--logger", "none", *EVALUATED),
]
# Each process makes its own tasks by acting; the random numbers have addresses.
LEARNERS["policy"] = [
    *("maml-cartpole", "--horizon", "30", "--shots", "3", "--queries", "3", "--eval-queries", "2"),
    *("--inner-steps", "2", "--meta-batch-size", "7", "--iterations", "3"),
    *("--test-model", "best", "--dtype", "float64", "--logger", "none", *EVALUATED),
]
# World size → the (learner, strategy) pairs of one launch. World size 0: without a launcher.
BY_SIZE = {
    0: [("local", "rpc exclusive"), ("local", "allreduce")],
    1: [("local", "rpc exclusive"), ("local", "allreduce")],
    # With one trainer, no other trainer's update can come between.
    2: [
        *(("local", name) for name in [*IN_ORDER, "param-server async"]),
        ("local", "param-server async remote"),
        ("supervised", "rpc chunk"),
        ("sinusoid", "rpc chunk"),
        # Learners other than maml, each with some of the strategies.
        *(("mamlpp", name) for name in ("rpc chunk", "allreduce", "param-server sync")),
        *(("reptile", name) for name in ("rpc exclusive", "allreduce")),
        *(("protonet", name) for name in ("rpc chunk", "allreduce")),
        *((name, "rpc chunk") for name in ("r2d2", "metacurv", "noadapt")),
        *((name, "allreduce") for name in ("cavia", "boil", "finetune")),
    ],
    3: [
        *(("local", name) for name in [*IN_ORDER, "param-server backup"]),
        ("local", "param-server remote"),
        *(("metasgd", name) for name in ("rpc exclusive", "allreduce")),
        *(("imaml", name) for name in ("rpc chunk", "param-server sync")),
        ("sinusoid", "rpc exclusive"),
        *(("policy", name) for name in ("rpc exclusive", "allreduce", "param-server sync")),
    ],
    5: [("local", name) for name in ("rpc chunk", "allreduce", "param-server collective")],
}
# Values that depend on the clock, on the transport or on the flags.
OF_THE_TOPOLOGY = (
    "changed",
    *("seconds", "tasks_per_second", "reduce_seconds", "server_seconds", "time"),
    *("wire_bytes", "link_bytes", "dropped", "staleness"),
)
Tensors = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """A run's parameters, and the values in its rows and its result, named by where they are."""

    parameters: Tensors
    said: dict[str, Any]


def trained(run_dir: Path) -> Trained:
    saved = torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True)
    assert saved["iteration"] == 3
    rows = {f"{row.get('split', 'train')} {row['iteration']}": row for row in metrics(run_dir)}
    assert rows.keys() == {"validation 2", "train 3", "test 3"}
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
        if isinstance(value, float) or name.endswith((": after", ": rates")):
            value = pytest.approx(value, rel=0, abs=1e-10)
        assert found.said[name] == value, f"{what}, {name}"


def assert_close(found: Tensors, expected: Tensors, what: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=lambda m: f"{what}: {m}")


def evaluations(run_dir: Path) -> Tensors:
    """Return the rows of all tasks of each split, as `tests.strategies.topologies` saved them."""
    return torch.load(run_dir / "rows.pt", weights_only=True)


def of(world_size: int) -> dict[str, list[str]]:
    """The configurations of a launch, by the folder that each trains into."""
    return {
        f"{learner} {name}": [*LEARNERS[learner], *WAYS[name]]
        for learner, name in BY_SIZE[world_size]
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in one process, without a launcher; return the folder of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    configurations = {name: [*flags, "--strategy", "local"] for name, flags in LEARNERS.items()}
    configurations["untrained"] = [*SEVEN_TASKS, "--iterations", "0"]
    configurations |= of(0)
    run([sys.executable, *TOPOLOGIES, str(folder), json.dumps(configurations)], timeout=240)
    return folder


@pytest.fixture(scope="module")
def local(alone: Path) -> Trained:
    return trained(alone / "local")


@pytest.mark.parametrize("world_size", BY_SIZE)
def test_equals_local(alone: Path, tmp_path: Path, world_size: int) -> None:
    """Seven tasks divide by no world size, so a mean over workers would be biased.

    Meta-SGD's rates are not weights of the network: all meta-parameters are sent and summed.
    iMAML's conjugate gradient solves each task separately, with any other tasks in its batch.
    There is one launch for each world size, because imports take most of its time.
    """
    folder = tmp_path if world_size else alone
    if world_size:
        command = [*torchrun(world_size, TOPOLOGIES), str(folder), json.dumps(of(world_size))]
        run(command, timeout=240)
    for learner, name in BY_SIZE[world_size]:
        what = f"{learner} {name}"
        assert_same(trained(folder / what), trained(alone / learner), what)
        # Means do not show the order of tasks, but rows do.
        assert_close(evaluations(folder / what), evaluations(alone / learner), what)


def test_tasks_are_told_apart(local: Trained, alone: Path) -> None:
    """Equality above would be empty if all tasks had the same metrics."""
    rows = evaluations(alone / "local")
    assert {split: len(of) for split, of in rows.items()} == {"validation": 3, "test": 7}
    losses = rows["test"][:, 0]
    assert (losses[:, None] - losses).abs().fill_diagonal_(1).min() > 1e-4
    # The reported numbers are the means of these rows.
    assert local.said["result: loss"] == pytest.approx(losses.mean().item(), rel=1e-12)
    validated = rows["validation"][:, 0].mean().item()
    assert local.said["validation 2: loss"] == pytest.approx(validated, rel=1e-12)


def test_training_moves_every_parameter(local: Trained, alone: Path) -> None:
    """Equality above would be empty if nothing trained, or learners were alike."""
    saved = torch.load(alone / "untrained" / "checkpoints" / "last.pt", weights_only=True)
    for name, tensor in local.parameters.items():
        # A convolution's bias is cancelled by the normalisation after it: no gradient.
        if not name.endswith("conv.bias"):
            assert (tensor - saved["model"][name]).abs().max() > 1e-4, name
    meta_sgd, imaml = (trained(alone / name).parameters for name in ("metasgd", "imaml"))
    rates = {k: t for k, t in meta_sgd.items() if k.startswith("rates.")}
    assert len(rates) == len(meta_sgd) / 2
    # Each rate has moved differently, except the rates of biases that normalisation cancels.
    assert all(len(t.unique()) > 1 for k, t in rates.items() if not k.endswith("conv.bias"))
    head = "network.head.weight"
    assert (imaml[head] - local.parameters[head]).abs().max() > 1e-4
