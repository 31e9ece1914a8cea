"""``--test-model best``: early stopping; without ``--stop-after``, without stopping early."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import maml
from maml import evaluate as evaluation
from maml.config.cli import parse
from maml.config.presets import PRESETS, changed, with_values
from maml.errors import UserError
from maml.run.checkpoint import numbered_checkpoint
from maml.run.files import read_rows
from maml.studies.sweeping.worker import value_of_run
from tests.runs import glyphs, last, metrics, result, same, sinusoid, train

pytestmark = pytest.mark.usefixtures("no_pictures")

# Its outer loop diverges: what validates best is neither the first nor the last.
CONFIG = sinusoid(
    iterations=9, eval_every=2, checkpoint_every=3, keep_checkpoints=1, test_tasks=5,
    meta_lr=0.03, test_model="best",
)  # fmt: skip


def best_of(run_dir: Path) -> int:
    losses = {row["iteration"]: row["loss"] for row in metrics(run_dir) if "split" in row}
    del losses[CONFIG.iterations]  # the test
    return min(losses, key=losses.__getitem__)


def test_the_best_is_tested_wherever_the_run_goes_on(tmp_path: Path) -> None:
    """No checkpoint of it is there."""
    whole = train(CONFIG, tmp_path / "whole")
    best = best_of(tmp_path / "whole")
    assert best not in (2, 8)
    found = result(tmp_path / "whole")
    assert (found["iterations"], found["tested_iteration"]) == (9, best)
    until = with_values(CONFIG, test_model="last", iterations=best, eval_every=0)
    assert same(train(until, tmp_path / "until")["model"], whole["best"]["model"])
    assert result(tmp_path / "until")["loss"] == found["loss"]

    # A sweep ranks the run by the model that it tests.
    losses = {
        row["iteration"]: row["loss"] for row in metrics(tmp_path / "whole") if "split" in row
    }
    assert value_of_run(tmp_path / "whole", "validation/loss") == losses[best]
    train(CONFIG, tmp_path / "last", test_model="last")
    assert value_of_run(tmp_path / "last", "validation/loss") == losses[8]

    for stopped in (best - 1, best, best + 1):
        for before, after in (("here", "here"), ("here", "elsewhere")):
            begun = tmp_path / f"{stopped} {after}" / before
            train(CONFIG, begun, iterations=stopped, test_tasks=0)
            there = begun.with_name(after)
            saved = numbered_checkpoint(begun, stopped)
            resume = "auto" if there == begun else str(saved)
            assert same(train(CONFIG, there, resume=resume)["best"], whole["best"])
            assert result(there)["loss"] == found["loss"]


def test_training_ends_when_no_better_model_was_found(tmp_path: Path) -> None:
    """Where it ends, it has ended when it is started again."""
    train(CONFIG, tmp_path / "whole")
    best = best_of(tmp_path / "whole")
    patient = with_values(CONFIG, iterations=50, stop_after=2)
    for _ in range(2):
        train(patient, tmp_path / "patient")
        found = result(tmp_path / "patient")
        assert (found["iterations"], found["tested_iteration"]) == (best + 2 * 2, best)
        assert found["loss"] == result(tmp_path / "whole")["loss"]
    train(CONFIG, tmp_path / "short", iterations=best + 3, stop_after=2)
    assert result(tmp_path / "short")["iterations"] == best + 3


def test_a_run_s_model_is_the_one_that_it_tests(tmp_path: Path) -> None:
    config = glyphs(
        iterations=3, eval_every=2, test_tasks=6, dtype="float64", test_model="best"
    )  # fmt: skip
    train(config, tmp_path)
    evaluation.main([str(tmp_path), "--tasks", "6"])
    evaluation.main([str(tmp_path), "--tasks", "6", "--iteration", "3"])
    own, other = read_rows(tmp_path / "evaluations.jsonl")
    assert (own["iteration"], own["loss"]) == (2, pytest.approx(result(tmp_path)["loss"]))
    assert other["iteration"] == 3 and other["loss"] != own["loss"]
    assert maml.load(tmp_path).iteration == 2
    assert same(maml.load(tmp_path).meta_params, last(tmp_path)["best"]["model"])
    assert maml.load(tmp_path, iteration=3).iteration == 3
    assert maml.load(tmp_path / "checkpoints" / "last.pt").iteration == 3


def test_without_a_validation_it_is_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(CONFIG, tmp_path, eval_every=100)
    assert result(tmp_path)["tested_iteration"] == 9
    said = "tested is the model after iteration 9, the last, as none was validated"
    assert said in capsys.readouterr().out
    for flags in ("--eval-every 0", "--eval-every 0 --test-tasks 0"):
        arguments = ["maml-miniimagenet-5way-1shot", *flags.split()]
        with contextlib.nullcontext() if "--test" in flags else refusal():
            parse(arguments)


def refusal() -> contextlib.AbstractContextManager[object]:
    return pytest.raises(UserError, match=r"--eval-every 0: .*; give --test-model last, too")


def test_what_chooses_it_stays_as_it_is(tmp_path: Path) -> None:
    """Scores of two kinds say nothing of each other."""
    train(CONFIG, tmp_path, iterations=3)
    for name, value in {"eval_tasks": 50, "transductive": False, "eval_inner_steps": 4}.items():
        with pytest.raises(UserError, match=rf"--(no-)?{name.replace('_', '-')} .*was made with"):
            train(CONFIG, tmp_path, **{name: value})
    train(CONFIG, tmp_path, test_tasks=6)


def test_presets_keep_as_many_as_an_ensemble_has() -> None:
    for name, config in PRESETS.items():
        if config.keep_best:
            assert config.eval_every % config.checkpoint_every == 0, name
            assert config.iterations // config.eval_every >= config.keep_best, name


def test_what_chooses_it_makes_another_experiment() -> None:
    assert "eval_tasks" not in changed(glyphs(test_model="last", eval_tasks=7))
    assert changed(glyphs(test_model="best", eval_tasks=7))["eval_tasks"] == 7
