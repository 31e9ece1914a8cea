"""The checkpoints that a run keeps by iteration, and what it says of itself in status.json."""

import errno
import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import torch

from maml import evaluate as evaluation
from maml.config.presets import with_values
from maml.errors import UserError
from maml.evaluation.best import BestModel, best
from maml.metagradient import outer_optimizer
from maml.processes.identity import Identity
from maml.run import checkpoint
from maml.run.checkpoint import last_checkpoint, numbered_checkpoint, numbered_checkpoints
from maml.run.directory import read_status
from maml.trainer import Trainer
from tests.launching import TRAIN, start
from tests.runs import as_flags, last, metrics, same, sinusoid, train
from tests.strategies.faults import planted

pytestmark = pytest.mark.usefixtures("no_pictures")

CONFIG = sinusoid(iterations=7, checkpoint_every=2)


def kept(run_dir: Path) -> list[int]:
    """The iterations of the numbered checkpoints; no other file may lie beside them."""
    found = numbered_checkpoints(run_dir)
    names = {path.name for path in found.values()} | {"last.pt"}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == names
    assert all(checkpoint.load(path)["iteration"] == n for n, path in found.items())
    return list(found)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_the_newest_are_kept(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        none = Mock(side_effect=OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)))
        monkeypatch.setattr("os.link", none)
    train(CONFIG, tmp_path, keep_checkpoints=2)
    assert kept(tmp_path) == [6, 7]
    assert read_status(tmp_path) == status("finished", 7)
    newest = numbered_checkpoint(tmp_path, 7)
    assert newest.name == "iteration-00000007.pt"
    assert newest.read_bytes() == last_checkpoint(tmp_path).read_bytes()
    assert newest.samefile(last_checkpoint(tmp_path)) is links
    train(CONFIG, tmp_path, iterations=9, keep_checkpoints=1)
    assert kept(tmp_path) == [9]


def test_the_best_stay(tmp_path: Path) -> None:
    """The best validated checkpoints stay in addition to the newest, also after a resumption."""
    values = {"eval_every": 2, "checkpoint_every": 5, "keep_checkpoints": 1, "keep_best": 2}
    config = with_values(CONFIG, **values, iterations=6)
    train(config, tmp_path)
    for iterations in (6, 17):
        train(config, tmp_path, iterations=iterations)
        losses = {row["iteration"]: row["loss"] for row in metrics(tmp_path) if "split" in row}
        assert list(losses) == list(range(2, iterations + 1, 2))
        assert kept(tmp_path) == sorted({*sorted(losses, key=losses.__getitem__)[:2], iterations})


def best_of(rows: list[dict[str, Any]], there: Path) -> list[int]:
    (there / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return best(there, range(len(rows)), transductive=True)


def test_a_score_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    """In any order: a sort by comparisons would put the best anywhere."""
    for order in itertools.permutations([-0.1, math.nan, -0.3, math.nan, -0.2]):
        for judged, sign in (("accuracy", 1), ("loss", -1)):
            scores = [{"split": "validation", judged: sign * score} for score in order]
            found = best_of([{"iteration": i, **row} for i, row in enumerate(scores)], tmp_path)
            assert [order[i] for i in found[:3]] == [-0.1, -0.2, -0.3]


def test_the_loss_decides_between_equals(tmp_path: Path) -> None:
    """Also after a resumption; a checkpoint of an earlier version holds no loss."""
    rows = [
        {"iteration": i, "split": "validation", "accuracy": accuracy, "loss": loss}
        for i, (accuracy, loss) in enumerate([(0.9, 0.2), (1.0, 0.1), (1.0, 0.3), (1.0, 0.1)])
    ]
    assert best_of(rows, tmp_path) == [3, 1, 2, 0]
    model, home = {"weight": torch.ones(1)}, torch.device("cpu")
    for earlier, expected in (({}, [0, 1, 1, 3]), ({"score": 1.0}, [7, 1, 1, 3])):
        kept, found = BestModel(transductive=True), []
        if earlier:
            kept.restore(earlier | {"iteration": 7, "model": model}, home)
        for row in rows:
            kept.offer(row, row["iteration"], model)
            state, kept = kept.state(), BestModel(transductive=True)
            kept.restore(state, home)
            found.append(kept.iteration)
        assert found == expected


def test_going_back_takes_back_what_came_after(tmp_path: Path, monkeypatch: Any) -> None:
    """This holds at once: a run that fails before its first save continues from the older one."""
    straight = train(CONFIG, tmp_path)
    older = str(numbered_checkpoint(tmp_path, 4))
    with monkeypatch.context() as patched:
        patched.setattr(outer_optimizer.OuterOptimizer, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Trainer(with_values(CONFIG, run_dir=str(tmp_path), resume=older)).run()
    assert last(tmp_path)["iteration"] == 4
    assert read_status(tmp_path) == status("failed", 4)
    assert kept(tmp_path) == [2, 4]
    assert metrics(tmp_path)[-1]["iteration"] == 4
    assert same(train(CONFIG, tmp_path)["model"], straight["model"])
    assert kept(tmp_path) == [2, 4, 6, 7]


def warnings_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning: ")]


def test_without_last_it_goes_on_from_the_newest(tmp_path: Path, capsys: Any) -> None:
    straight = train(CONFIG, tmp_path)
    last_checkpoint(tmp_path).unlink()
    with pytest.raises(UserError, match="already holds a run"):
        train(CONFIG, tmp_path, resume="never")
    assert same(train(CONFIG, tmp_path)["model"], straight["model"])
    (line,) = warnings_of(capsys)
    newest = numbered_checkpoint(tmp_path, 7)
    missing = f"{last_checkpoint(tmp_path)}: no such checkpoint"
    assert line == f"warning: {missing}; going on from {newest}, after iteration 7"
    assert kept(tmp_path) == [2, 4, 6, 7]
    # A kill between the two names leaves last.pt without its number; the next start adds it.
    newest.unlink()
    train(CONFIG, tmp_path, iterations=8)
    assert kept(tmp_path) == [2, 4, 6, 7, 8]


def truncated(path: Path) -> None:
    os.truncate(path, 1000)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def frozen(path: Path) -> None:
    """Spoil it as a gradient with an infinite square did, before such steps were refused."""
    content = checkpoint.load(path)
    content["optimizer"]["state"][0]["exp_avg_sq"][3] = math.inf
    with open(path, "r+b") as file:
        torch.save(content, file)


def reshaped(path: Path) -> None:
    """Remove an element of the optimizer's state."""
    content = checkpoint.load(path)
    state = content["optimizer"]["state"][0]
    state["exp_avg"] = state["exp_avg"][:-1].clone()
    with open(path, "r+b") as file:
        torch.save(content, file)


@pytest.mark.parametrize(
    ("spoil", "others"), [(truncated, ()), (frozen, (6,)), (reshaped, ()), (flipped, (6, 4, 2))]
)
def test_a_damaged_one_is_set_aside(
    spoil: Any, others: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoint 7 is the same file as last.pt. Damaged files are renamed: nothing is lost."""
    straight = train(CONFIG, tmp_path)
    names = [last_checkpoint(tmp_path), *(numbered_checkpoint(tmp_path, n) for n in (7, *others))]
    for path in (names[0], *names[2:]):
        spoil(path)
    before = [path.read_bytes() for path in names]
    capsys.readouterr()
    if others == (6, 4, 2):
        with pytest.raises(UserError, match=r"last\.pt: .*; none of the others can be"):
            train(CONFIG, tmp_path)
        assert [path.read_bytes() for path in names] == before
        return
    assert same(train(CONFIG, tmp_path)["model"], straight["model"])
    (line,) = warnings_of(capsys)
    source = numbered_checkpoint(tmp_path, min((7, *others)) - 2 + (others == ()))
    assert line.startswith(f"warning: {names[0]}: ") and f"; going on from {source}, after" in line
    aside = [path.with_name(f"{path.name}.damaged") for path in names]
    assert line.endswith(f"kept aside as {', '.join(path.name for path in aside)}")
    assert [path.read_bytes() for path in aside] == before
    assert list(numbered_checkpoints(tmp_path)) == [2, 4, 6, 7]
    assert [row["iteration"] for row in metrics(tmp_path)] == list(range(1, 8))
    # Once more: the earlier ones stay as well.
    spoil(names[0])
    train(CONFIG, tmp_path)
    assert [path.read_bytes() for path in aside] == before
    assert (names[0].parent / "last.pt.damaged-2").exists()


def test_what_is_not_damaged_is_not_passed_over(tmp_path: Path, capsys: Any) -> None:
    """The run does not go back because of another version's format or a changed flag."""
    train(CONFIG, tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(UserError, match=r"--iterations 3: .* iteration 7; give more, or "):
        train(CONFIG, tmp_path, iterations=3, test_tasks=1)
    assert (tmp_path / "result.json").read_bytes() == before  # of more tasks, perhaps
    for content, says in (
        ({"format": 2}, "format 1"),
        ([1], "format 1"),
        (None, "--meta-lr is 0.1"),
    ):
        if content is not None:
            last_checkpoint(tmp_path).unlink()
            torch.save(content, last_checkpoint(tmp_path))
        else:
            last_checkpoint(tmp_path).write_bytes(b"damaged")
        with pytest.raises(UserError, match=says):
            train(CONFIG, tmp_path, meta_lr=0.1)
        assert [path.name for path in (tmp_path / "checkpoints").glob("*.damaged*")] == []
    assert warnings_of(capsys) == []


def test_another_networks_model(tmp_path: Path) -> None:
    """The model lacks a tensor, or has one that copying would broadcast or convert."""
    train(CONFIG, tmp_path)
    whole = checkpoint.load(last_checkpoint(tmp_path))
    name = next(name for name, tensor in whole["model"].items() if tensor.shape == (40,))
    for there, says in (
        (None, r"none there, float32 \[40\] here"),
        (torch.zeros(1), r"float32 \[1\] there, float32 \[40\]"),
        (torch.zeros(40).half(), r"float16 \[40\] there, float32 \[40\]"),
    ):
        model = whole["model"] | {name: there}
        if there is None:
            del model[name]
        checkpoint.save(last_checkpoint(tmp_path), whole | {"model": model})
        with pytest.raises(UserError, match=f"last.pt: its model .*{name} is {says}"):
            train(CONFIG, tmp_path)
        with pytest.raises(UserError, match=f"{tmp_path}, after 7: its model .*{name} is {says}"):
            evaluation.main([str(tmp_path), "--tasks", "1"])
    # A part of the wrong type or value.
    path = last_checkpoint(tmp_path)
    parts = {"config": None, "optimizer": {}, "model": [1], "iteration": -5, "seconds": math.nan}
    parts |= {part: {"x": 1} for part in ("guard", "best", "own_files")}
    parts |= {"starts": [5]}
    for part, value in parts.items():
        checkpoint.save(path, {**whole, part: value})
        with pytest.raises(UserError, match=f"{part}|another version"):
            train(CONFIG, tmp_path, iterations=9, resume=str(path))


def test_two_at_once(tmp_path: Path) -> None:
    """A second job is refused while the first runs, but not after the first was killed."""
    forever = {"iterations": 10**6, "checkpoint_every": 10**6, "run_dir": str(tmp_path)}
    first = start([*TRAIN, *as_flags(with_values(CONFIG, **forever))])
    first.wait_for("iterations 0 to", timeout=60)
    named = f"process {first.process.pid} of .* since 20.*"
    with pytest.raises(UserError, match=f"--run-dir {tmp_path}: {named} is training"):
        train(CONFIG, tmp_path)
    assert read_status(tmp_path)["state"] == "training"  # type: ignore[index]
    first.process.kill()
    first.wait(10, expect=-signal.SIGKILL)
    assert read_status(tmp_path)["state"] == "lost"  # type: ignore[index]
    assert train(CONFIG, tmp_path)["iteration"] == 7


# ---- status.json ------------------------------------------------------------------------------


def status(state: str, iteration: int) -> dict[str, Any]:
    return {"state": state, "iteration": iteration, "process": Identity.own()._asdict()}


def test_the_status_is_never_behind_a_checkpoint(tmp_path: Path) -> None:
    """Here it is killed as soon as last.pt is there."""
    run_dir = tmp_path / "run"
    script = planted(tmp_path, "os.link = lambda *_: os.kill(os.getpid(), 9)")
    config = with_values(CONFIG, run_dir=str(run_dir))
    launched = start([sys.executable, script, *as_flags(config)])
    launched.wait(60, expect=-signal.SIGKILL)
    assert last(run_dir)["iteration"] == 2
    assert read_status(run_dir) == status("lost", 2) | {"process": ANY}


def test_no_status(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    strange = '{"state": ["a"], "iteration": {}}', '{"state": "training", "iteration": "9"}'
    for text in ("", "{", "3", "{}", '{"state": "training"}', 9999 * "[", *strange):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) is None
