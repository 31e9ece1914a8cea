"""An ordinary classifier from command to result: trained, tested, continued, evaluated again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from maml.config.presets import PRESETS, with_values
from maml.errors import UserError
from maml.evaluation.scores import evaluate, summary
from maml.run.directory import read_config
from maml.trainer import Trainer
from tests.launching import run, run_train
from tests.runs import last, metrics, result, same, supervised, train


def test_the_preset_from_command_to_result(tmp_path: Path, cache_dir: Path) -> None:
    """Chance is 1 % of 100 classes; half of its iterations reach far beyond."""
    environment = {"MAML_CACHE": str(cache_dir)}
    args = ["supervised-glyphs-lenet", "--iterations", "700", "--logger", "none"]
    done = run_train([*args, "--run-dir", str(tmp_path)], timeout=240, env=environment)
    found = result(tmp_path)
    assert found["accuracy"] - found["ci95"] > 0.5
    # One answer, as LeNet normalises nothing; precision@1 is accuracy by another name.
    assert found["accuracy"] == found["precision@1"] == found["transductive_accuracy"]
    assert found["ci95"] == found["precision@1_ci95"] > 0
    assert found["precision@5"] > found["precision@1"]
    assert (found["tasks"], found["transductive"]) == (20, False)
    rows = metrics(tmp_path)
    validation = [row for row in rows if row.get("split") == "validation"]
    assert [row["iteration"] for row in validation] == [350, 700]
    for row in validation:
        assert row["precision@1"] == row["accuracy"] < row["precision@5"] <= 1
        assert row["precision@1_ci95"] == row["accuracy_ci95"] > 0
    training = [row for row in rows if "split" not in row]
    assert training[-1]["accuracy"] > 0.8 > 0.1 > training[0]["accuracy"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    sentence = rf"{100 * found['accuracy']:.2f} ± \S+ % \(non-transductive\), \S+ ± \S+ % \(trans.*"
    sentence += r"precision@5 \S+ %: mean ± 95 % interval over 20 batches of 20 examples"
    assert re.search(f"test accuracy {sentence}", done.stdout + done.stderr)
    # 600 tasks are asked for by default; the 400 test examples are seen once.
    command = [sys.executable, "-m", "maml.evaluate", str(tmp_path)]
    again = run(command, 120, env=environment)
    assert re.fullmatch(rf"iteration 700: test accuracy {sentence}\n", again.stdout)
    (row,) = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    for name in ("accuracy", "precision@1", "precision@5", "precision@1_ci95", "tasks"):
        assert row[name] == found[name], name


@pytest.mark.usefixtures("no_pictures")
def test_continues_bit_for_bit(tmp_path: Path) -> None:
    """Across the end of an epoch, which is seven mini-batches."""
    config = supervised(iterations=6)
    straight = train(config, tmp_path / "straight")
    halfway = train(config, tmp_path / "resumed", iterations=3)
    resumed = train(config, tmp_path / "resumed")
    assert (halfway["iteration"], resumed["iteration"]) == (3, 6)
    assert not same(halfway["model"], straight["model"])
    assert same(resumed["model"], straight["model"])
    assert same(resumed["optimizer"], straight["optimizer"])


@pytest.mark.usefixtures("no_pictures")
def test_another_batch_size_is_another_run(tmp_path: Path) -> None:
    train(supervised(), tmp_path)
    with pytest.raises(UserError, match=r"--batch-size is 4, but .* was made with 8"):
        train(supervised(batch_size=4), tmp_path)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("epochs", "meta_batch_size", "iterations"), [(1, 7, 1), (3, 2, 11)])
def test_epochs_say_how_many_iterations(
    tmp_path: Path, epochs: int, meta_batch_size: int, iterations: int
) -> None:
    """Seven mini-batches an epoch, rounded up; config.yaml says what was done."""
    config = supervised(epochs=epochs, meta_batch_size=meta_batch_size)
    assert train(config, tmp_path)["iteration"] == iterations
    written = read_config(tmp_path)
    assert (written.epochs, written.iterations) == (epochs, iterations)
    # One more epoch continues the same run.
    longer = train(with_values(config, epochs=epochs + 1), tmp_path)
    assert longer["iteration"] == -(-7 * (epochs + 1) // meta_batch_size)
    assert same(longer, last(tmp_path))


def test_evaluation_sees_each_example_once(tmp_path: Path) -> None:
    """Asked for more, it ends: 16 test examples are two batches of 8."""
    trainer = Trainer(supervised(run_dir=str(tmp_path))).setup
    from maml.strategies.local import Local

    strategy = Local(trainer.config, trainer.world, trainer.worker)
    params = trainer.worker.learner.meta_parameters()
    for asked, done in ((1, 1), (2, 2), (600, 2)):
        assert evaluate(strategy, params, "test", asked)["tasks"] == done
    assert evaluate(strategy, params, "train", 600)["tasks"] == 7


def test_summary_says_what_was_measured() -> None:
    config = PRESETS["supervised-cifar10-resnet18"]
    found = {
        "split": "test", "tasks": 200, "accuracy": 0.9, "accuracy_ci95": 0.01,
        "non_transductive_accuracy": 0.89, "non_transductive_accuracy_ci95": 0.011,
        "precision@5": 0.99, "non_transductive_precision@5": 0.985,
    }  # fmt: skip
    assert summary(found, config, config.transductive) == (
        "test accuracy 89.00 ± 1.10 % (non-transductive), 90.00 ± 1.00 % (transductive), "
        "precision@5 98.50 %: mean ± 95 % interval over 200 batches of 50 examples"
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("supervised-")])
def test_presets_evaluate_one_pass(name: str) -> None:
    """As many tasks as there are batches of held-out examples, and validation once an epoch."""
    from datasets.torchvision_sets import SOURCES

    config = PRESETS[name]
    if config.data in SOURCES:
        sizes = SOURCES[config.data].sizes
        validation = sizes["train"] // 10
        train, test = sizes["train"] - validation, sizes["test"]
        assert config.ways == SOURCES[config.data].classes
    else:
        train, validation, test = (config.ways * drawings for drawings in (14, 2, 4))
    assert config.eval_tasks == -(-validation // config.batch_size)
    assert config.test_tasks == -(-test // config.batch_size)
    an_epoch = train // config.batch_size / config.meta_batch_size
    assert config.iterations % config.eval_every == 0
    assert config.eval_every % an_epoch < 1
    assert not config.transductive
