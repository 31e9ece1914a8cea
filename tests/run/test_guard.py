"""A step that is not finite is not taken, and its tasks are found; divergence is reported early."""

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from datasets.sinusoid import Sinusoid
from datasets.tasks import Task
from maml import replay
from maml.config.presets import with_values
from maml.errors import UserError
from maml.run.checkpoint import last_checkpoint, numbered_checkpoint
from maml.run.directory import read_status
from maml.run.files import read_rows
from maml.strategies.local import Local
from maml.training.guard import LONG, MODELS, SKIPPED_IN_A_ROW, Guard, rows_of
from tests.launching import run, torchrun
from tests.runs import as_flags, last, metrics, refused, result, same, sinusoid, train
from tests.strategies.faults import IN_ORDER, STRATEGIES

pytestmark = pytest.mark.usefixtures("no_pictures")

BAD = 7


class Poisoned(Sinusoid):
    """A target of training task `BAD` is NaN, in whichever process has the task."""

    def tasks(self, ids: Tensor) -> Task:
        tasks = super().tasks(ids)
        if self.split == "train":
            self.spoil(tasks, ids == BAD)
        return tasks

    def spoil(self, tasks: Task, bad: Tensor) -> None:
        tasks.query_y[bad, 0] = math.nan


class Huge(Poisoned):
    """A point of the task is so far away that only the square of its gradient is not finite."""

    def spoil(self, tasks: Task, bad: Tensor) -> None:
        tasks.query_x[bad, 0] = 1e12


# Three tasks a step: the third step has tasks 6, 7 and 8.
POISONED = sinusoid(data="tests.run.test_guard:Poisoned", iterations=6, meta_batch_size=3)
HUGE = {"data": "tests.run.test_guard:Huge", "inner_steps": 0}


@pytest.mark.parametrize(
    ("values", "reason", "why"),
    [
        ({}, "the loss is nan", f"query_y of train task {BAD} has values that are not finite"),
        (HUGE, r"the gradient is too large, \de\+\d+: its square is not finite", ""),
    ],
    ids=["loss", "gradient"],
)
def test_a_step_that_is_not_finite_stops_the_run(
    values: dict[str, Any],
    reason: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error names the checkpoint from before the step, and replay finds the task."""
    said = why or "training has diverged"
    with pytest.raises(UserError, match=f"^{reason} at iteration 3: {said}; ") as caught:
        train(POISONED, tmp_path, **values)
    line = str(caught.value)
    assert str(last_checkpoint(tmp_path)) in line
    assert ("--inner-lr may help" in line) == (not why)
    assert same(
        last(tmp_path)["model"], train(POISONED, tmp_path / "2", iterations=2, **values)["model"]
    )
    assert read_status(tmp_path)["state"] == "failed"  # type: ignore[index]
    (row,) = read_rows(rows_of(tmp_path))
    assert (row["iteration"], row["tasks"], row["action"]) == (3, [6, 7, 8], "stop")
    capsys.readouterr()
    assert replay.main([str(tmp_path), "--trust"]) == 0
    out, err = capsys.readouterr()
    assert "has changed" not in err
    first, *tasks, verdict = out.splitlines()
    assert first.startswith(f"{tmp_path}: iteration 3: ")
    assert [line.split(":")[0] for line in tasks] == ["task 6", "task 7", "task 8"]
    assert ["not finite in network." in line for line in tasks] == [False, True, False]
    assert [line.endswith(f"; {why}") for line in tasks] == [False, bool(why), False]
    assert verdict == f"1 of 3 tasks not finite: {BAD}"
    # The same command fails again, but --on-nonfinite skip gets past the step.
    with pytest.raises(UserError, match="at iteration 3"):
        train(POISONED, tmp_path, **values)
    train(POISONED, tmp_path, on_nonfinite="skip", **values)
    found = result(tmp_path)
    assert (found["skipped"], found["iterations"], found["diverged"]) == (1, 6, None)
    assert [row.get("skipped") for row in metrics(tmp_path)] == [None, None, 1, None, None, None]
    assert all(math.isfinite(row["loss"]) for row in metrics(tmp_path) if "loss" in row)


def test_a_skipped_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train(POISONED, tmp_path, iterations=2)
    rows_of(tmp_path).write_text('{"iteration": 3, "rea')  # cut short by a full disk
    after = train(POISONED, tmp_path, iterations=3, on_nonfinite="skip")
    assert same(before["model"], after["model"]) and same(before["optimizer"], after["optimizer"])
    assert after["iteration"] == 3 and result(tmp_path)["skipped"] == 1
    # The skipped step also counts in a run that goes on elsewhere.
    elsewhere = {"on_nonfinite": "skip", "resume": str(last_checkpoint(tmp_path))}
    train(POISONED, tmp_path / "elsewhere", **elsewhere)
    assert result(tmp_path / "elsewhere")["skipped"] == 1
    straight = train(POISONED, tmp_path / "straight", on_nonfinite="skip")
    assert same(train(POISONED, tmp_path, on_nonfinite="skip")["model"], straight["model"])
    # The step does not count if the run goes back and takes it.
    monkeypatch.setattr(Poisoned, "spoil", lambda *_: None)
    back = str(numbered_checkpoint(tmp_path, 2))
    train(POISONED, tmp_path, on_nonfinite="skip", resume=back)
    assert result(tmp_path)["skipped"] == 0


def test_a_run_that_only_skips_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Local.meta_step

    def meta_step(strategy: Any, params: Any, ids: Any) -> Any:
        share = real(strategy, params, ids)
        return share._replace(totals=share.totals * math.inf)

    monkeypatch.setattr(Local, "meta_step", meta_step)
    config = sinusoid(iterations=10**6, on_nonfinite="skip", log_every=7)
    train(config, tmp_path, iterations=30)  # a restart does not count anew
    with pytest.raises(UserError, match=f"at each of the last {SKIPPED_IN_A_ROW}: training has"):
        train(config, tmp_path)
    assert len(list((tmp_path / "nonfinite").iterdir())) == MODELS
    assert len(read_rows(rows_of(tmp_path))) == SKIPPED_IN_A_ROW
    assert "loss" not in metrics(tmp_path)[-1]


def test_all_strategies_and_ranks_decide_the_same(tmp_path: Path) -> None:
    """Different ranks have the bad task; the parameters are those of `local`."""
    config = with_values(
        POISONED, iterations=5, on_nonfinite="skip", dtype="float64", resume="never"
    )
    flags = as_flags(config)
    alone = train(config, tmp_path / "alone")["model"]
    strategies = {**IN_ORDER, "async": STRATEGIES["param-server async"]}
    asked = {name: [*flags, *strategy] for name, strategy in strategies.items()}
    topologies = ["-m", "tests.strategies.topologies", str(tmp_path), json.dumps(asked)]
    run([*torchrun(2, topologies)], 180)
    for name in strategies:
        (row,) = read_rows(rows_of(tmp_path / name))
        assert BAD in row["tasks"] and row["action"] == "skip", name
        assert result(tmp_path / name)["skipped"] == 1
        model = last(tmp_path / name)["model"]
        torch.testing.assert_close(model, alone, rtol=1e-10, atol=1e-10)


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    def refusal(*options: str) -> str:
        return refused(replay.main, [str(tmp_path), "--trust", *options])

    with pytest.raises(UserError):
        train(POISONED, tmp_path)
    assert "--iteration 4: no model was kept of it; of 3" in refusal("--iteration", "4")
    for text, says in (('{"iteration": 3}\n', "without its tasks"), ('{"iter\n\n', "is not a row")):
        rows_of(tmp_path).write_text(text)
        assert says in refusal()
    rows_of(tmp_path).unlink()
    assert "no step of this run was refused" in refusal()


# ---- divergence before NaN ---------------------------------------------------------------------


def test_a_loss_far_above_its_beginning_is_named(tmp_path: Path, capsys: Any) -> None:
    """All numbers are finite, but useless; a resumed run still reports the divergence."""
    config = sinusoid(iterations=LONG + 50, log_every=50, meta_lr=100.0, inner_steps=0)
    for iterations in (30, LONG + 20, LONG + 50):
        train(config, tmp_path, iterations=iterations)
        assert result(tmp_path)["diverged"]["loss"] > 4 * result(tmp_path)["diverged"]["beginning"]
    said = [
        line for line in capsys.readouterr().err.splitlines() if "training has diverged" in line
    ]
    assert len(said) == 2, "once for each start that met it"
    assert said[0].startswith("warning: the loss is ") and f"at iteration {LONG}" in said[0]
    train(config, tmp_path / "healthy", meta_lr=1e-3)
    assert result(tmp_path / "healthy")["diverged"] is None
    assert "warning" not in capsys.readouterr().err


def look(losses: list[float]) -> list[str]:
    run: Any = types.SimpleNamespace(iteration=0, speaks=True)
    guard, said = Guard(run), list[str]()
    for run.iteration, loss in enumerate(losses):
        guard.look(loss, said.append)
    return said


def test_what_is_no_divergence() -> None:
    assert look([2.0] + [1.0] * 500) == []
    assert look(([2.0] + [100.0] * 9) * 5 + [1.0] * 200) == [], "for a while only"
    assert look([2.0] + [1.0, 1.0, 1.0, 500.0] * 100) == [], "now and then"
    assert look([-3.0] + [1e6] * 500) == [], "a loss below zero has no scale"
    assert len(look([2.0] + [9.0] * 500)) == 1
