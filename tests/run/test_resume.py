"""A run that stops and continues is the run that never stopped."""

import contextlib
import errno
import os
import pickle
import random
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from maml.config.presets import with_values
from maml.errors import UserError
from maml.run import checkpoint
from maml.strategies.local import Local
from maml.trainer import Trainer
from tests.datasets.test_array_pickle import Hostile
from tests.launching import run
from tests.runs import glyphs, last, metrics, refused, result, same, sinusoid, supervised, train

pytestmark = pytest.mark.usefixtures("no_pictures")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, without what a clock measured."""
    return [{**row, "seconds": 0, "tasks_per_second": 0, "time": {}} for row in metrics(run_dir)]


@pytest.mark.parametrize("family", [sinusoid, glyphs, supervised])
def test_continues_bit_for_bit(family: Any, tmp_path: Path) -> None:
    config = family(iterations=6)  # a classifier's seventh mini-batch ends an epoch
    assert config.dtype == "float32"
    straight = train(config, tmp_path / "straight")
    halfway = train(config, tmp_path / "resumed", iterations=3)
    resumed = train(config, tmp_path / "resumed")
    assert (halfway["iteration"], resumed["iteration"]) == (3, 6)
    assert not same(halfway["model"], straight["model"])
    assert same(resumed["model"], straight["model"])
    assert same(resumed["optimizer"], straight["optimizer"])
    assert rows_of(tmp_path / "straight") == rows_of(tmp_path / "resumed")
    # And what is finished is not trained again.
    rows = metrics(tmp_path / "resumed")
    assert same(train(config, tmp_path / "resumed")["model"], resumed["model"])
    assert metrics(tmp_path / "resumed") == rows


def test_a_checkpoint_from_before_a_flag_was_there(tmp_path: Path) -> None:
    """A version without a flag did what the default does, so only the default may be resumed."""
    config = sinusoid(iterations=2, meta_optimizer="sgd")
    saved = train(config, tmp_path)
    for name in ("proximal", "meta_momentum"):
        del saved["config"][name]
    torch.save(saved, checkpoint.last_checkpoint(tmp_path))
    with pytest.raises(UserError, match=r"--meta-momentum is 0.5, but .* made with 0\.0"):
        train(config, tmp_path, iterations=4, meta_momentum=0.5)
    assert train(config, tmp_path, iterations=4)["iteration"] == 4


def test_where_the_rate_falls_to_the_end_stays(tmp_path: Path) -> None:
    """Each step's learning rate depends on the number of iterations."""
    falling = sinusoid(iterations=2, meta_schedule="cosine")
    train(falling, tmp_path)
    with pytest.raises(UserError, match=r"--iterations is 4, but .* was made with 2; give"):
        train(falling, tmp_path, iterations=4)


def test_rows_are_means_since_the_row_before(tmp_path: Path, monkeypatch: Any) -> None:
    """Also when a run was stopped or killed between two rows, or killed just before a row."""
    config = glyphs(iterations=8, log_every=4, checkpoint_every=3, on_nonfinite="skip")
    real = Local.meta_step
    endings: dict[int, Any] = {2: "SIGTERM", 6: KeyboardInterrupt, 7: KeyboardInterrupt}

    def step(strategy: Local, params: Any, ids: Any) -> Any:
        share = real(strategy, params, ids)
        number = int(ids[0]) // config.meta_batch_size + 1
        if number in (1, 6):
            share.totals[0] = torch.nan
        end = endings.pop(number, None)
        if isinstance(end, str):
            strategy.stop.signal = end
        elif end is not None:
            raise end
        return share

    monkeypatch.setattr(Local, "meta_step", step)
    parted = str(tmp_path / "parted")
    assert Trainer(with_values(config, run_dir=parted)).run() == 143
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parted")
    train(config, tmp_path / "parted")
    assert not endings
    train(config, tmp_path / "straight")
    train(config, tmp_path / "each", log_every=1)
    each = {row["iteration"]: row for row in metrics(tmp_path / "each")}
    # A checkpoint also writes a row, so that none of its sums is pending.
    for name, expected in {"straight": [3, 4, 6, 8], "parted": [2, 3, 4, 6, 8]}.items():
        rows = metrics(tmp_path / name)
        assert [row["iteration"] for row in rows] == expected
        for before, row in zip([0, *expected], rows, strict=False):
            steps = [each[i] for i in range(before + 1, row["iteration"] + 1)]
            mean = fmean(step["loss"] for step in steps if "loss" in step)
            assert row["loss"] == pytest.approx(mean)
            skipped = sum(step.get("skipped", 0) for step in steps)
            assert row.get("skipped", 0) == skipped
    assert result(tmp_path / "parted")["skipped"] == 2


def test_rows_are_not_doubled(tmp_path: Path) -> None:
    """The checkpoint of a crashed run is older than its last rows."""
    config = sinusoid(iterations=6, eval_every=2, eval_tasks=3)
    train(config, tmp_path, iterations=3)
    shutil.copy(checkpoint.last_checkpoint(tmp_path), tmp_path / "older.pt")
    train(config, tmp_path)
    once = rows_of(tmp_path)
    os.replace(tmp_path / "older.pt", checkpoint.last_checkpoint(tmp_path))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 7, "lo')  # cut short by the crash
    train(config, tmp_path)
    twice = rows_of(tmp_path)
    assert twice == once
    assert [row["iteration"] for row in twice if "split" not in row] == [1, 2, 3, 4, 5, 6]
    assert [row["iteration"] for row in twice if "split" in row] == [2, 4, 6]
    assert all(line.endswith("}") for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_an_interrupted_validation_is_made_up(tmp_path: Path, monkeypatch: Any) -> None:
    """The checkpoint is of the iteration whose validation was stopped."""
    config = sinusoid(iterations=4, eval_every=2, eval_tasks=9, task_batch=4)
    evaluate = Local.evaluate

    def stop_after(strategy: Local, *args: Any) -> Any:
        rows = evaluate(strategy, *args)
        strategy.stop.signal = "SIGTERM"
        return rows

    monkeypatch.setattr(Local, "evaluate", stop_after)
    assert Trainer(with_values(config, run_dir=str(tmp_path / "stopped"))).run() == 143
    monkeypatch.undo()
    assert last(tmp_path / "stopped")["iteration"] == 2
    assert not any("split" in row for row in metrics(tmp_path / "stopped"))
    train(config, tmp_path / "stopped")
    train(config, tmp_path / "straight")
    rows = rows_of(tmp_path / "straight")
    assert rows == rows_of(tmp_path / "stopped")
    assert len([row for row in rows if "split" in row]) == 2


def test_nothing_overwrites_another_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(sinusoid(), first)
    before = train(sinusoid(), second)
    for resume in (str(checkpoint.last_checkpoint(first)), "never"):
        with pytest.raises(UserError, match=f"--resume {resume}: {second} already .*--run-dir"):
            train(sinusoid(), second, resume=resume)
    assert same(before, last(second))


def test_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = train(sinusoid(iterations=5), tmp_path / "straight")
    train(sinusoid(iterations=2), tmp_path / "begun")
    source = checkpoint.last_checkpoint(tmp_path / "begun")
    monkeypatch.setenv("HOME", str(tmp_path))
    from_home = f"~/{source.relative_to(tmp_path)}"
    continued = train(sinusoid(iterations=5, resume=from_home), tmp_path / "continued")
    assert same(continued["model"], straight["model"])
    # The rows of the earlier run are there, too.
    assert [row["iteration"] for row in metrics(tmp_path / "continued")] == [1, 2, 3, 4, 5]
    assert checkpoint.load(source)["iteration"] == 2
    rows = tmp_path / "begun" / "metrics.jsonl"
    rows.write_text("{]\n" + rows.read_text())
    with pytest.raises(UserError, match=f"^{rows}"):
        train(sinusoid(iterations=5, resume=str(source)), tmp_path / "again")


def test_changed_flags_are_refused_as_they_are_spelled(tmp_path: Path) -> None:
    config = glyphs(iterations=1, learner="mamlpp", lslr=False, filters=8)
    before = train(config, tmp_path)
    for name, value in (("inner_lr", 0.5), ("order", "first"), ("seed", 9)):
        message = refused(train, config, tmp_path, iterations=2, **{name: value})
        assert message.startswith(f"--{name.replace('_', '-')} is {value}, ")
        assert str(getattr(config, name)) in message
    with pytest.raises(UserError, match=r"\(1 more differ\); give --no-lslr --filters 8, or "):
        train(config, tmp_path, iterations=2, lslr=True, filters=16)
    assert same(before, last(tmp_path))


# ---- damaged checkpoints ----------------------------------------------------------------------


def test_a_flipped_bit_is_never_another_model(tmp_path: Path) -> None:
    whole, path, n_refused = train(sinusoid(), tmp_path), checkpoint.last_checkpoint(tmp_path), 0
    healthy = path.read_bytes()
    for seed in range(300):
        generator = random.Random(seed)
        damaged = bytearray(healthy)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            # A bit between the archive's members changes no content.
            assert same(checkpoint.load(path), whole)
        except UserError:
            n_refused += 1
    assert n_refused > 50


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_code_in_a_checkpoint_is_not_run(how: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "last.pt", tmp_path / "made by the checkpoint"
    content = {**whole(1), "format": 1, "model": Hostile(os.mkdir, str(victim))}
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    for load in (checkpoint.load, checkpoint.load_parameters):
        with pytest.raises(UserError, match=f"^{path}: "):
            load(path)
    assert not victim.exists()
    with contextlib.suppress(RuntimeError):  # torch goes on to miss its magic number
        torch.load(path, weights_only=False)
    assert victim.exists(), "the file held no code: this test shows nothing"


# ---- crashes while saving ---------------------------------------------------------------------


def whole(iteration: int) -> dict[str, Any]:
    """The smallest content of a checkpoint."""
    return {
        "model": {}, "optimizer": {}, "iteration": iteration, "seconds": 0.0, "config": {},
    }  # fmt: skip


@pytest.mark.parametrize("where", ["rename", "flush", "write"])
def test_failed_save_keeps_the_earlier_one(where: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "checkpoints" / "last.pt"
    path.parent.mkdir()
    # The next save removes the file that a kill has left.
    (path.parent / "last.pt.host.12345.tmp").write_bytes(b"half a checkpoint")
    (path.parent / "last.pt.a-folder.tmp").mkdir()
    checkpoint.save(path, whole(1))
    (path.parent / "last.pt.a-folder.tmp").rmdir()
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    target = {"rename": "os.replace", "flush": "os.fsync", "write": "torch.save"}[where]
    monkeypatch.setattr(f"maml.run.checkpoint.{target}", full)
    with pytest.raises(UserError, match=f"^{path}: .*No space left.*earlier checkpoint"):
        checkpoint.save(path, whole(2))
    assert checkpoint.load(path)["iteration"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


def test_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write, before its end, and before the rename."""
    code = """
import os, signal, sys
from pathlib import Path
import torch
from maml.run import checkpoint

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

path, rest = Path(sys.argv[1]), {"model": {}, "optimizer": {}, "seconds": 0.0, "config": {}}
checkpoint.save(path, {"iteration": 1, **rest})
for module, name in ((torch, "save"), (os, "fsync"), (os, "replace")):
    if not (child := os.fork()):
        half = lambda content, file: die(file.write(b"half"))
        setattr(module, name, half if name == "save" else die)
        checkpoint.save(path, {"iteration": 2, **rest})
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, name
    assert checkpoint.load(path)["iteration"] == 1
"""
    run([sys.executable, "-c", code, str(tmp_path / "last.pt")], timeout=120)
