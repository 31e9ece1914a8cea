"""``--init``: weights from another run or another program, and the way back to plain torch."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maml
from maml.config.cli import parse
from maml.errors import UserError
from maml.run import directory
from maml.trainer import Trainer
from maml.training.initial import met_before
from tests.launching import REPO
from tests.runs import glyphs, last, result, same, train

pytestmark = pytest.mark.usefixtures("no_pictures")


def begun(run_dir: Path, **values: Any) -> dict[str, Tensor]:
    """Return the weights that a run begins with."""
    model: dict[str, Tensor] = train(glyphs(iterations=0, **values), run_dir)["model"]
    return model


def test_what_was_tested_is_tested_again(tmp_path: Path) -> None:
    """As a run, as its checkpoint, and as a state_dict of what was loaded, in torch's formats."""
    done = tmp_path / "done"
    train(glyphs(iterations=1, test_tasks=4), done)
    weights, files = maml.load(done).module.state_dict(), (tmp_path / "new.pt", tmp_path / "old.pt")
    for file, zipped in zip(files, (True, False), strict=True):
        torch.save(weights, file, _use_new_zipfile_serialization=zipped)
    for i, init in enumerate((done, done / "checkpoints/last.pt", *files)):
        again = tmp_path / str(i)
        train(glyphs(iterations=0, test_tasks=4, init=str(init)), again)
        assert result(again)["loss"] == result(done)["loss"]
        assert result(again)["published"] is None
        assert result(again)["changed"]["init"] == str(init)


def test_what_other_programs_publish(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dictionary with more than weights; a wrapped part of another network; a larger head.

    What is missing or has another shape begins as without --init, and a line names it.
    """
    source = glyphs(learner="finetune", seed=1, iterations=1, train_ways=800)
    theirs, drawn = train(source, tmp_path / "theirs")["model"], begun(tmp_path / "drawn")
    weights = {
        f"module._orig_mod.net.encoder.{name.removeprefix('network.')}": tensor
        for name, tensor in theirs.items()
        if name != "network.head.bias"
    }
    halved = next(iter(theirs))
    theirs[halved] = theirs[halved].half().float()
    weights |= {name: weights[name].half() for name in weights if name.endswith(halved[8:])}
    weights["classifier.weight"] = torch.zeros(64, 3)
    state = {"state": {0: {"step": torch.zeros(1)}}}
    torch.save({"weights": weights, "epoch": 3, "optimizer": state}, tmp_path / "saved.pt")
    capfd.readouterr()
    ours = begun(tmp_path / "ours", init=str(tmp_path / "saved.pt"))
    taken = {name for name in theirs if "head" not in name}
    for name, tensor in ours.items():
        assert torch.equal(tensor, (theirs if name in taken else drawn)[name]), name
    said = capfd.readouterr().err
    line = f"weights: {len(taken)} of {len(ours)} tensors from {tmp_path / 'saved.pt'}"
    names = "without _orig_mod. and module.net.encoder. before their names"
    assert f"{line}, its weights, {names}; converted from float16; anew: network.head" in said


def test_a_stopped_run_goes_on_without_it(tmp_path: Path) -> None:
    """Its own checkpoint has all that it needs. The weights it began with may be gone."""
    train(glyphs(iterations=1), tmp_path / "theirs")
    at_once = glyphs(init=str(tmp_path / "theirs"), iterations=2)
    whole = train(at_once, tmp_path / "whole")["model"]
    train(at_once, tmp_path / "ours", iterations=1)
    shutil.rmtree(tmp_path / "theirs")
    assert same(train(at_once, tmp_path / "ours")["model"], whole)
    with pytest.raises(UserError, match=r"--init is None, but .* was made with"):
        train(glyphs(iterations=3), tmp_path / "ours")


def test_classes_that_the_weights_have_met_are_counted(tmp_path: Path) -> None:
    """Published splits of a data set differ; a folder's user may move a class to another split."""
    one = {"train": ["a", "b", "c"], "validation": ["d"], "test": ["e", "f"]}
    other = {"train": ["d", "e", "f"], "validation": ["a", "b"], "test": ["c", "g", "h"]}
    there = tmp_path / "checkpoints/last.pt"
    directory.write_json(tmp_path / "classes.json", one)
    assert met_before(str(there), one) == ""
    said = met_before(str(there), other)
    assert "2 of the 2 validation classes" in said and "1 of the 3 test classes" in said
    directory.write_json(tmp_path / "classes.json", {"train": ["train/cat", "train/dog"]})
    now = {"train": ["train/dog"], "validation": ["val/cow"], "test": ["test/bird", "test/cat"]}
    assert "trained on 1 of the 2 test classes, by their" in met_before(str(tmp_path), now)
    assert met_before(str(tmp_path), {}) == met_before(str(tmp_path / "no/where/x"), now) == ""


def test_what_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    """In one line, before there is a run directory."""
    path, one = tmp_path / "saved", torch.zeros(1)
    for saved, says in (
        ({}, "neither a checkpoint nor a state_dict of tensors"),
        ({"student": {"a": one}, "teacher": {"a": one}}, "under student, teacher; save only"),
        ({"other": one}, "none of its tensors has a name and shape of these: network."),
        ({"blocks.0.conv.weight": torch.zeros(9, 1, 3, 3)}, r"is \[9, 1, 3, 3\] there, \[8, 1, 3,"),
        ({"blocks.0.conv.bias": torch.ones(8).int()}, r"is int32 \[8\] there, float32 \[8\] here"),
        ({"blocks.0.conv.bias": torch.full((8,), torch.nan)}, "conv.bias is not finite there"),
    ):
        torch.save(saved, path)
        with pytest.raises(UserError, match=rf"--init {path}: .*{says}|--init .*{says}"):
            train(glyphs(init=str(path)), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"^--init /dev/null: .*: Not a regular file$"):
        train(glyphs(init="/dev/null"), tmp_path / "run")


def test_to_plain_torch_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own network, with its own tensor names, answers in torch as it does here."""
    shutil.copy(REPO / "docs/examples/my_network.py", tmp_path / "my_plain_network.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    from my_plain_network import Wide  # type: ignore[import-not-found]

    torch.manual_seed(7)
    theirs: nn.Module = Wide((1, 28, 28), 5)
    torch.save(theirs.state_dict(), "theirs.pt")
    flags = [
        "maml-glyphs-5way-1shot", "--network", "my_plain_network:Wide", "--iterations", "0",
        "--eval-every", "0", "--test-tasks", "0", "--logger", "none", "--run-dir", "run",
    ]  # fmt: skip
    assert Trainer(parse([*flags, "--init", "theirs.pt"])).run() == 0
    assert last(tmp_path / "run")["config"]["init"] == str(tmp_path / "theirs.pt")
    model = maml.load("run", device="cpu", trust=True)
    state = model.network_state()
    assert state.keys() == dict(theirs.named_parameters()).keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in state.items())
    task = maml.episodes("glyphs", split="test", ways=5, shots=1, queries=3).task(0)
    adapted = model.adapt(task.support_x, range(5))
    again: nn.Module = Wide((1, 28, 28), 5)
    missing = again.load_state_dict(adapted.module.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert not set(missing.missing_keys) & dict(again.named_parameters()).keys()
    expected = adapted.logits(task.query_x, "query")
    with torch.no_grad():
        torch.testing.assert_close(again.train()(task.query_x), expected, rtol=1e-4, atol=1e-4)
