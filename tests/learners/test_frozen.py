"""Parameters that neither adapt nor learn: by --freeze, or by the network's own code."""

import sys
from pathlib import Path

import pytest
import torch

import maml
from maml.config import Config
from maml.config.cli import parse
from maml.errors import UserError
from maml.learners import build_learner
from maml.learners.maml import MAML
from maml.trainer import Trainer
from tests.runs import glyphs, last, same, train

pytestmark = pytest.mark.usefixtures("no_pictures")

NETWORK = """
import torch
from torch import nn
class Frozen(nn.Module):
    def __init__(self, shape, ways):
        super().__init__()
        self.body = nn.Linear(784, 16).requires_grad_(False)
        self.register_buffer("shift", torch.randn(16))
        self.head = nn.Linear(16, ways)
        self.unread = nn.Parameter(torch.ones(2), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            self.shift += 0.1
            features = torch.relu(self.body(x.flatten(1)) + self.shift)
        return self.head(features)
"""


class Late(MAML):
    """A learner that freezes too late: after the network is made."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.network.get_submodule("head").requires_grad_(False)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_frozen_body_is_anil_whose_body_does_not_learn(kernels: str, tmp_path: Path) -> None:
    """The head has the same gradient in both; one plain SGD step shows it."""
    values = {"dtype": "float64", "iterations": 1, "meta_optimizer": "sgd", "kernels": kernels}
    begun = train(glyphs(**values | {"iterations": 0}), tmp_path / "begun")["model"]
    anil = train(glyphs(**values, adapt="@head"), tmp_path / "anil")["model"]
    frozen = train(glyphs(**values, freeze="@body"), tmp_path / "frozen")["model"]
    for name, tensor in frozen.items():
        learns = name.startswith("network.head")
        assert torch.equal(tensor, begun[name]) != learns, name
        expected = anil[name] if learns else begun[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12, msg=name)


def test_what_an_author_has_frozen_stays_and_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through checkpoints, into another run, into plain torch, and into a user's own loop."""
    (tmp_path / "partly_frozen.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    flags = [
        "maml-glyphs-5way-1shot", "--network", "partly_frozen:Frozen", "--eval-every", "0",
        "--test-tasks", "0", "--logger", "none", "--weight-decay", "0.1", "--run-dir",
    ]  # fmt: skip
    for name, iterations in (("begun", "0"), ("done", "2")):
        assert Trainer(parse([*flags, name, "--iterations", iterations])).run() == 0
    begun, done = (last(tmp_path / name)["model"] for name in ("begun", "done"))
    stays = {name for name in done if torch.equal(done[name], begun[name])}
    still = {"body.weight", "body.bias", "unread"}
    assert stays == {f"network.module.{name}" for name in still}

    model = maml.load("done", device="cpu", trust=True)
    state = model.network_state()
    assert state.keys() == {*still, "head.weight", "head.bias", "shift"}
    with pytest.warns(UserWarning, match="^module: its buffer shift: "):
        model.module(model.episodes("train").tasks([0, 1])).backward()
    learned = model.learner.named_parameters()
    assert {name for name, one in learned if one.grad is not None} == done.keys() - stays

    capfd.readouterr()
    anew = [*flags, "anew", "--iterations", "0", "--seed", "7", "--init", "done"]
    assert Trainer(parse(anew)).run() == 0
    assert same(last(tmp_path / "anew")["model"], done)
    said = capfd.readouterr().err
    assert "buffers, as --network makes them: module.shift" in said
    assert said.count("warning: --network partly_frozen:Frozen: its buffer shift: ") == 1


@pytest.mark.parametrize("learner", ["mamlpp", "metasgd", "imaml"])
def test_frozen_norms_stay_whatever_the_learner(learner: str, tmp_path: Path) -> None:
    """MAML++ has norms for each step; those that are frozen have one value."""
    values = {"learner": learner, "freeze": "@norm", "weight_decay": 0.1, "inner_steps": 2}
    begun = train(glyphs(**values, iterations=0), tmp_path / "begun")["model"]
    done = train(glyphs(**values, iterations=2), tmp_path / "done")["model"]
    norms = {name for name in done if ".norm." in name and "rates" not in name}
    assert norms and all(torch.equal(done[name], begun[name]) for name in norms)
    assert any(not torch.equal(done[name], begun[name]) for name in done)


def test_what_cannot_be_frozen_is_refused() -> None:
    for values, says in {
        ("--freeze", "nonsense"): "--freeze nonsense .*'nonsense' names none",
        ("--freeze", "@head", "--adapt", "@head"): "all that would adapt is frozen",
        ("--learner", "tests.learners.test_frozen:Late"): "it freezes head.weight of its net",
    }.items():
        with pytest.raises(UserError, match=says):
            build_learner(parse(["maml-glyphs-5way-1shot", *values]))
