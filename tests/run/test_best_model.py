"""Validations: what they tell, the best model, and early stopping."""

from pathlib import Path
from typing import Any

import pytest

import maml
from maml import evaluate as evaluation
from maml.config.presets import with_values
from maml.run.checkpoint import numbered_checkpoint
from maml.run.files import read_rows
from tests.runs import glyphs, last, metrics, result, same, sinusoid, train

pytestmark = pytest.mark.usefixtures("no_pictures")

# Its outer loop diverges, so the best validation is neither the first nor the last.
CONFIG = sinusoid(
    iterations=9, eval_every=2, checkpoint_every=3, keep_checkpoints=1, test_tasks=5,
    meta_lr=0.03, test_model="best",
)  # fmt: skip


def best_of(run_dir: Path) -> int:
    losses = {row["iteration"]: row["loss"] for row in metrics(run_dir) if "split" in row}
    del losses[CONFIG.iterations]  # the test
    return min(losses, key=losses.__getitem__)


def test_the_best_is_tested_wherever_the_run_goes_on(tmp_path: Path) -> None:
    """The best model's checkpoint is not there."""
    whole = train(CONFIG, tmp_path / "whole")
    best = best_of(tmp_path / "whole")
    assert best not in (2, 8)
    found = result(tmp_path / "whole")
    assert (found["iterations"], found["tested_iteration"]) == (9, best)
    until = with_values(CONFIG, test_model="last", iterations=best, eval_every=0)
    assert same(train(until, tmp_path / "until")["model"], whole["best"]["model"])
    assert result(tmp_path / "until")["loss"] == found["loss"]

    for stopped in (best - 1, best + 1):
        begun, there = tmp_path / f"{stopped} here", tmp_path / f"{stopped} elsewhere"
        train(CONFIG, begun, iterations=stopped, test_tasks=0)
        saved = numbered_checkpoint(begun, stopped)
        assert same(train(CONFIG, there, resume=str(saved))["best"], whole["best"])
        assert result(there)["loss"] == found["loss"]


def test_training_ends_when_no_better_model_was_found(tmp_path: Path) -> None:
    """A run that has ended early does not go on when it is started again."""
    train(CONFIG, tmp_path / "whole")
    best = best_of(tmp_path / "whole")
    patient = with_values(CONFIG, iterations=50, stop_after=2)
    for _ in range(2):
        train(patient, tmp_path / "patient")
        found = result(tmp_path / "patient")
        assert (found["iterations"], found["tested_iteration"]) == (best + 2 * 2, best)
        assert found["loss"] == result(tmp_path / "whole")["loss"]
    train(patient, tmp_path / "patient", stop_after=3)
    assert result(tmp_path / "patient")["iterations"] == best + 3 * 2
    train(CONFIG, tmp_path / "short", iterations=best + 3, stop_after=2)
    assert result(tmp_path / "short")["iterations"] == best + 3


def test_a_run_s_model_is_the_one_that_it_tests(tmp_path: Path) -> None:
    config = glyphs(iterations=3, eval_every=2, test_tasks=6, dtype="float64", test_model="best")
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


def test_without_a_validation_it_is_the_last(tmp_path: Path, capsys: Any) -> None:
    train(CONFIG, tmp_path, eval_every=100)
    assert result(tmp_path)["tested_iteration"] == 9
    said = "testing the model after iteration 9, the last, as no model was validated"
    assert said in capsys.readouterr().out


def test_validations_tell_of_the_inner_loop(tmp_path: Path) -> None:
    """They report each inner step, or three of many steps, and learned rates."""
    values = {"iterations": 1, "eval_every": 1}
    train(glyphs(learner="metasgd", eval_inner_steps=3, **values), tmp_path / "few")
    train(sinusoid(eval_inner_steps=20, **values), tmp_path / "many")
    few, many = (metrics(tmp_path / name)[-1] for name in ("few", "many"))
    assert list(few["after"]) == ["0", "1", "2", "3"]
    assert all(0 <= accuracy <= 1 for accuracy in few["after"].values())
    assert {name.partition("/")[0] for name in few["rates"]} == {"1"}
    assert list(many["after"]) == ["0", "10", "20"] and "rates" not in many
    assert many["after"]["0"] > 0
