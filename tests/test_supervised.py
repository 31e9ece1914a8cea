"""An ordinary classifier from command to result: trained, tested, continued, evaluated again."""

import json
import re
from pathlib import Path

import pytest

from maml import evaluate as evaluation
from maml.config.cli import parse
from maml.config.presets import PRESETS, with_values
from maml.errors import UserError
from maml.run.directory import read_config
from maml.trainer import Trainer
from tests.runs import metrics, result, supervised, train


def test_the_preset_from_command_to_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Chance is 5 % of 20 classes; a few iterations reach beyond."""
    args = ["supervised-glyphs-lenet", "--ways", "20", "--iterations", "120", "--logger", "none"]
    args += ["--eval-every", "120"]
    assert Trainer(parse([*args, "--run-dir", str(tmp_path)])).run() == 0
    found = result(tmp_path)
    assert found["accuracy"] - found["ci95"] > 0.1
    # One answer, as LeNet normalises nothing; precision@1 is accuracy by another name.
    assert found["accuracy"] == found["precision@1"] == found["transductive_accuracy"]
    assert found["ci95"] == found["precision@1_ci95"] > 0
    assert found["precision@5"] > found["precision@1"]
    assert (found["tasks"], found["transductive"]) == (4, False)
    rows = metrics(tmp_path)
    (validation,) = [row for row in rows if row.get("split") == "validation"]
    assert validation["precision@1"] == validation["accuracy"] < validation["precision@5"] <= 1
    assert validation["precision@1_ci95"] == validation["accuracy_ci95"] > 0
    training = [row for row in rows if "split" not in row]
    assert training[-1]["accuracy"] > 0.2 > 0.1 > training[0]["accuracy"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    sentence = rf"{100 * found['accuracy']:.2f} ± \S+ % \(non-transductive\), \S+ ± \S+ % \(trans.*"
    sentence += r"precision@5 \S+ %: mean ± 95 % interval over 4 batches of 20 examples"
    assert re.search(f"test accuracy {sentence}", "".join(capfd.readouterr()))
    # 600 tasks are asked for by default; the 80 test examples are seen once.
    assert evaluation.main([str(tmp_path)]) == 0
    assert re.fullmatch(rf"iteration 120: test accuracy {sentence}\n", capfd.readouterr().out)
    (row,) = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    for name in ("accuracy", "precision@1", "precision@5", "precision@1_ci95", "tasks"):
        assert row[name] == found[name], name
    for flag, says in (("--steps", "takes no inner step"), ("--shots", "is not for --learner su")):
        with pytest.raises(UserError, match=f"^{flag} 2.* {says}"):
            evaluation.main([str(tmp_path), flag, "2"])


@pytest.mark.usefixtures("no_pictures")
def test_epochs_say_how_many_iterations(tmp_path: Path) -> None:
    """Seven mini-batches an epoch, rounded up; config.yaml says what was done."""
    config = supervised(epochs=3, meta_batch_size=2)
    assert train(config, tmp_path)["iteration"] == 11
    written = read_config(tmp_path)
    assert (written.epochs, written.iterations) == (3, 11)
    # One more epoch continues the same run.
    assert train(with_values(config, epochs=4), tmp_path)["iteration"] == 14
    with pytest.raises(
        UserError, match=r"^--epochs 3: .* was made after iteration 14; give more, "
    ):
        train(config, tmp_path)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("supervised-")])
def test_presets_evaluate_one_pass(name: str) -> None:
    """There is one task for each batch of held-out examples, and one validation an epoch."""
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
