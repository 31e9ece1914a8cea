"""The pretended accelerator's tests, each in processes of its own: see `tests.device`."""

import json
import sys
from pathlib import Path

import pytest
import torch

from maml.config.cli import parse
from maml.config.presets import with_values
from maml.trainer import Trainer
from tests.compiler import needs_compiler
from tests.device import compiled
from tests.launching import run, torchrun
from tests.runs import last
from tests.strategies.test_own_networks import WORDS

pytestmark = needs_compiler
ON_DEVICE = "-m", "tests.device"
ENV = {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compiled()


def test_in_one_process() -> None:
    suite = ["-m", "pytest", "tests/device/on_device.py", "-q", "-p", "no:cacheprovider"]
    run([sys.executable, *ON_DEVICE, *suite], timeout=120)


def test_strategies(tmp_path: Path, no_pictures: None) -> None:
    """A network that draws, recurs and attends: CPU to device, whatever thread computes. Each
    process sees one device, and has it for itself.
    """
    words = [*WORDS, "--iterations", "2", "--test-tasks", "3"]
    assert Trainer(with_values(parse(words), run_dir=str(tmp_path / "local"))).run() == 0
    runs = {
        name: [*words, "--device", "pretended", *own]
        for name, own in {
            "allreduce": ["--strategy", "allreduce"],
            "rpc": ["--strategy", "rpc"],
            "remote": ["--strategy", "param-server", "--ps-forward", "remote"],
            "collective": ["--strategy", "param-server", "--ps-transport", "collective"],
        }.items()
    }
    command = torchrun(3, [*ON_DEVICE, "-m", "tests.strategies.topologies"])
    env = ENV | {"PRETENDED_ALONE": "1"}
    done = run([*command, str(tmp_path), json.dumps(runs)], 120, env=env)
    assert done.stderr.count("pccl: rank") == 3, done.stderr
    expected = last(tmp_path / "local")["model"]
    for name in runs:
        found = last(tmp_path / name)["model"]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=name)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Each rank on a device of its own: the gradients go from device to device."""
    script = tmp_path / "own.py"
    script.write_text(
        "import pytest, torch, maml\n"
        "from tests.device import forget, synchronisations\n"
        "from tests.library.own_networks import dense, made, stacked\n"
        "def trained(learner, place):\n"
        "    tasks = [part.to(place) for part in stacked(made())]\n"
        "    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)\n"
        "    for _ in range(3):\n"
        "        forget()\n"
        "        optimizer.zero_grad()\n"
        "        learner(tasks).backward()\n"
        "        optimizer.step()\n"
        "    waits.append(sum(synchronisations().values()))\n"
        "    return [p.detach().cpu() for p in learner.parameters()]\n"
        "waits = []\n"
        "torch.manual_seed(0)\n"
        "expected = trained(maml.MAML(dense(), inner_lr=0.1), 'cpu')\n"
        "rank = maml.distributed()\n"
        "torch.manual_seed(rank)\n"
        "learner = maml.MAML(dense(), inner_lr=0.1).to(f'pretended:{rank}')\n"
        "found = trained(learner, f'pretended:{rank}')\n"
        # Its labels, and what tells that all have the same tasks.
        "assert waits == [0, 2]\n"
        "torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)\n"
        "x, *parts = [part.to(f'pretended:{rank}') for part in stacked(made())]\n"
        "for other in (x.flip(0) if rank else x, x + 1e-12 * rank):\n"
        "    with pytest.raises(maml.UserError, match='the tasks of rank 1 are not those'):\n"
        "        learner((other, *parts))\n"
    )
    done = run([*torchrun(2, [*ON_DEVICE, str(script)])], 120, env=ENV)
    assert done.stderr.count("pccl: rank") == 2
