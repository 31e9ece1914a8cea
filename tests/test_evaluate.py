"""Evaluation: the interval, what it may depend on, and the command."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import maml
from datasets.errors import DataError
from datasets.tasks import Task
from maml import evaluate as evaluation
from maml.config import Config
from maml.config.checks import most_threads
from maml.config.presets import PRESETS, with_values
from maml.errors import UserError
from maml.evaluation import by_class
from maml.evaluation.scores import evaluate, mean_and_ci95, summary
from maml.learners import asked as of_learner
from maml.learners import build_learner
from maml.processes.program import run_program
from maml.processes.world import World
from maml.run import checkpoint
from maml.strategies.local import Local
from maml.worker import Worker
from tests.launching import run
from tests.runs import glyphs, last, metrics, result, sinusoid, supervised, train

ALONE = World(0, 1, 0, 1, launched=False)


def local(config: Config) -> Local:
    return Local(config, ALONE, Worker(config, torch.device("cpu")))


# ---- the interval -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_and_interval(dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).random(600)
    mean, ci95 = mean_and_ci95(torch.tensor(values, dtype=dtype))
    exact = torch.tensor(values, dtype=dtype).double().numpy()
    assert mean == pytest.approx(exact.mean(), rel=1e-14)
    assert ci95 == pytest.approx(1.96 * exact.std(ddof=1) / np.sqrt(600), rel=1e-12)


def test_interval_by_hand() -> None:
    # Values 0, 0, 1, 1: mean 1/2, sample variance 1/3.
    mean, ci95 = mean_and_ci95(torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert mean == 0.5
    assert ci95 == pytest.approx(1.96 * math.sqrt(1 / 3) / 2, rel=1e-12)


def test_interval_covers_the_mean_95_times_in_100() -> None:
    draws = torch.rand(2000, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    intervals = [mean_and_ci95(row) for row in draws]
    covered = sum(abs(mean - 0.5) <= ci95 for mean, ci95 in intervals) / len(intervals)
    # 95 % less the little that the normal quantile lacks; ± 4 deviations of the estimate.
    assert abs(covered - 0.948) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_one_task_has_no_interval() -> None:
    mean, ci95 = mean_and_ci95(torch.tensor([0.25]))
    assert mean == 0.25
    assert ci95 is None  # null in JSON, which knows no NaN


# ---- what a result depends on -----------------------------------------------------------------


def test_same_whatever_the_batches() -> None:
    config = glyphs(dtype="float64")
    params = build_learner(config).meta_parameters()
    results = [
        evaluate(local(with_values(config, task_batch=batch)), params, "test", 7)
        for batch in (1, 3, 16)
    ]
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for name, value in results[0].items():
            assert other[name] == (value if name == "split" else pytest.approx(value, rel=1e-9))


def test_is_the_mean_over_its_tasks() -> None:
    config = glyphs(dtype="float64")
    strategy = local(config)
    params = strategy.worker.learner.meta_parameters()
    found = evaluate(strategy, params, "validation", 9)
    rows = strategy.evaluate(params, "validation", torch.arange(9)).numpy()
    for name, column in zip(strategy.worker.evaluation_names, rows.T, strict=True):
        assert found[name] == pytest.approx(column.mean(), rel=1e-12)
        exact = 1.96 * column.std(ddof=1) / 3
        assert found[f"{name}_ci95"] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert (found["split"], found["tasks"]) == ("validation", 9)


def test_splits_are_different_tasks() -> None:
    strategy = local(glyphs(dtype="float64"))
    params = strategy.worker.learner.meta_parameters()
    losses = {split: evaluate(strategy, params, split, 6)["loss"] for split in evaluation.SPLITS}
    assert len(set(losses.values())) == 3


def test_changes_no_parameter() -> None:
    strategy = local(glyphs())
    params = strategy.worker.learner.meta_parameters()
    before = {name: tensor.detach().clone() for name, tensor in params.items()}
    evaluate(strategy, params, "test", 4)
    assert all(torch.equal(before[name], tensor.detach()) for name, tensor in params.items())
    assert all(tensor.grad is None for tensor in params.values())


# ---- transductive or not ----------------------------------------------------------------------


def query_losses(config: Config, task: Task) -> dict[str, Tensor]:
    """The metrics of one task (no leading dimension)."""
    learner = build_learner(config)
    with torch.no_grad():
        found = learner.evaluate(learner.meta_parameters(), Task(*(part[None] for part in task)))
    return {name: values[0] for name, values in found.items()}


@pytest.fixture(scope="module")
def batch() -> Task:
    return local(glyphs(dtype="float64")).worker.evaluation("test").tasks(torch.arange(2))


def test_one_query_s_answer_depends_on_no_other_unless_transductive(batch: Task) -> None:
    """The loss of a set of queries is the mean of losses of each of them, asked for alone."""
    config = glyphs(dtype="float64")
    task = Task(*(part[0] for part in batch))
    whole = query_losses(config, task)
    each = [
        query_losses(
            config, task._replace(query_x=task.query_x[i : i + 1], query_y=task.query_y[i : i + 1])
        )
        for i in range(len(task.query_y))
    ]
    alone = {name: torch.stack([one[name] for one in each]).mean() for name in whole}
    non_transductive = "non_transductive_loss"
    assert alone[non_transductive].item() == pytest.approx(whole[non_transductive].item(), rel=1e-9)
    assert abs(alone["loss"] - whole["loss"]) > 1e-6


def test_other_queries_change_the_transductive_answer_only(batch: Task) -> None:
    config = glyphs(dtype="float64")
    first, second = (Task(*(part[i] for part in batch)) for i in (0, 1))
    seen: dict[str, list[Tensor]] = {"": [], "non_transductive_": []}
    learner = build_learner(config)
    weights = learner.network_weights(learner.meta_parameters())
    for others in (first, second):
        # The first query is the same, the others are another task's.
        query_x = torch.cat([first.query_x[:1], others.query_x[1:]])
        with torch.no_grad():
            _, of_support = learner.call_network(weights, first.support_x)
            for prefix, given in (("", None), ("non_transductive_", of_support)):
                seen[prefix].append(learner.call_network(weights, query_x, given)[0][0])
    assert (seen[""][0] - seen[""][1]).abs().max() > 1e-6
    assert torch.allclose(
        seen["non_transductive_"][0], seen["non_transductive_"][1], rtol=0, atol=1e-12
    )


def test_a_network_without_batch_norm_has_one_answer() -> None:
    found = evaluate(local(sinusoid()), build_learner(sinusoid()).meta_parameters(), "test", 5)
    assert found["loss"] == found["non_transductive_loss"]


def test_an_untrained_learner_is_little_better_than_chance() -> None:
    """Five ways, queries by their own labels: 20 % is blind, and untrained features see little."""
    config = glyphs(ways=5, queries=3, eval_queries=3, eval_inner_steps=3, filters=64)
    strategy = local(config)
    params = strategy.worker.learner.meta_parameters()
    found = evaluate(strategy, params, "test", 40)
    assert 0.20 < found["accuracy"] < 0.50
    # Without adapting at all it is blind: the head starts near zero and knows no class.
    blind = evaluate(local(with_values(config, eval_inner_steps=0)), params, "test", 40)
    assert abs(blind["accuracy"] - 0.2) < 4 * blind["accuracy_ci95"] / 1.96
    assert found["accuracy"] > blind["accuracy"]


# ---- the sentence -----------------------------------------------------------------------------


def test_summary_says_under_what_conditions() -> None:
    found = {
        "split": "test", "tasks": 600, "accuracy": 0.987, "accuracy_ci95": 0.004,
        "non_transductive_accuracy": 0.95, "non_transductive_accuracy_ci95": 0.0123,
    }  # fmt: skip
    config = glyphs(ways=5, shots=1, eval_queries=15, eval_inner_steps=3)
    assert summary(found, config, True) == (
        "test accuracy 98.70 ± 0.40 % (transductive), 95.00 ± 1.23 % (non-transductive): "
        "mean ± 95 % interval over 600 tasks, 5-way 1-shot, 15 queries per class, 3 inner steps"
    )
    assert summary(found, config, False).startswith(
        "test accuracy 95.00 ± 1.23 % (non-transductive), 98.70 ± 0.40 % (transductive): "
    )


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train(glyphs(iterations=2, test_tasks=8, ways=3), directory)
    return directory


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A trained run directory of this test's own."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def test_agrees_with_the_end_of_training(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation.main([str(run_dir), "--tasks", "8"])
    (row,) = rows(run_dir)
    trained = result(run_dir)
    for name in ("loss", "accuracy", "accuracy_ci95", "non_transductive_accuracy"):
        assert row[name] == trained[name], name
    assert row["transductive"] is True
    assert row["iteration"] == last(run_dir)["iteration"] == 2
    (line,) = capsys.readouterr().out.splitlines()
    accuracy = f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_ci95']:.2f} % (transductive)"
    assert line.startswith(f"iteration 2: test accuracy {accuracy}")
    assert line.endswith("over 8 tasks, 3-way 1-shot, 2 queries per class, 1 inner step")


def test_options(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation.main([str(run_dir), "--tasks", "8"])
    evaluation.main([str(run_dir), "--tasks", "5"])
    evaluation.main([str(run_dir), "--tasks", "8", "--split", "validation"])
    evaluation.main([str(run_dir), "--tasks", "8", "--split", "train"])
    evaluation.main([str(run_dir), "--tasks", "8", "--non-transductive"])
    found = rows(run_dir)
    assert [row["tasks"] for row in found] == [8, 5, 8, 8, 8]
    assert [row["split"] for row in found] == ["test", "test", "validation", "train", "test"]
    assert [row["transductive"] for row in found] == [True, True, True, True, False]
    assert len({row["loss"] for row in found}) == 4
    lines = capsys.readouterr().out.splitlines()
    share = 100 * found[4]["non_transductive_accuracy"]
    assert re.match(
        rf"iteration 2: test accuracy {share:.2f} ± \S+ % \(non-transductive\)", lines[4]
    )
    assert "validation accuracy" in lines[2]


def test_default_is_600_test_tasks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def few(strategy: Local, params: Any, split: str, tasks: int, **rest: Any) -> dict[str, Any]:
        asked.append((split, tasks))
        return evaluate(strategy, params, split, 2)

    monkeypatch.setattr(evaluation, "evaluate", few)
    evaluation.main([str(run_dir)])
    assert asked == [("test", 600)]


def test_what_is_asked_otherwise(run_dir: Path, tmp_path: Path) -> None:
    """Steps, shots and queries of one's own; the checkpoint that validated best, or a given one."""
    config = glyphs(iterations=3, eval_every=1, checkpoint_every=1)
    train(config, tmp_path)
    validated = [row for row in metrics(tmp_path) if row.get("split") == "validation"]
    best = max(validated, key=lambda row: (row["accuracy"], row["iteration"]))["iteration"]
    asked = ("--steps", "4", "--shots", "2", "--queries", "3", "--split", "validation")
    for arguments in (("--iteration", "best"), ("--iteration", "1"), asked):
        evaluation.main([str(tmp_path), "--tasks", "4", *arguments])
    found = rows(tmp_path)
    assert [row["iteration"] for row in found] == [best, 1, 3]
    assert (found[2]["eval_inner_steps"], found[2]["shots"], found[2]["eval_queries"]) == (4, 2, 3)
    like = with_values(config, eval_inner_steps=4, shots=2, eval_queries=3)
    params = last(tmp_path)["model"]
    expected = evaluate(local(like), params, "validation", 4)
    assert found[2]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


PLACES: list[Path] = []


def placed(split: str, data_root: Path) -> dict[str, Any]:
    """A data set that tells where it was looked for."""
    PLACES.append(data_root)
    return {name: np.zeros((9, 28, 28), np.uint8) for name in "abc"}


def test_another_data_set_is_not_looked_for_where_the_run_s_own_is(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be the folder of a user's own images: others would be downloaded into it."""
    path = run_dir / "config.yaml"
    path.write_text(re.sub(r"data_root: .*", "data_root: /mine", path.read_text()))
    monkeypatch.setenv("MAML_DATA", str(tmp_path / "default"))
    asked = [str(run_dir), "--tasks", "2", "--data", "tests.test_evaluate:placed"]
    evaluation.main(asked)
    assert set(PLACES) == {Path("/mine")}  # where named data sets are
    PLACES.clear()
    path.write_text(path.read_text().replace("data: glyphs", "data: tests.test_evaluate:named"))
    evaluation.main(asked)
    assert set(PLACES) == {tmp_path / "default"}
    PLACES.clear()
    evaluation.main([*asked, "--data-root", "elsewhere"])
    assert set(PLACES) == {Path("elsewhere")}
    text = path.read_text().replace("evaluate:named", "evaluate:placed")
    path.write_text(text.replace("/mine", "/others"))
    PLACES.clear()
    evaluation.main(asked)
    assert set(PLACES) == {Path("/others")}


def named(split: str) -> dict[str, Any]:
    """Classes of stripes, of which each is hard to tell from the next."""
    dice = np.random.default_rng(0)
    rows = np.arange(28)[:, None] * np.ones((1, 28))
    return {
        name: (dice.random((9, 28, 28)) * (rows % (place + 2) == 0) * 255).astype(np.uint8)
        for place, name in enumerate(["owl", "cat", "dog, wet", "eel"])
    }


@pytest.mark.parametrize("flags", [(), ("--non-transductive",)], ids=["", "non-transductive"])
def test_accuracy_by_class(
    flags: tuple[str, ...], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counts of adapting to each task and predicting, by names; a table of them."""
    data = "tests.test_evaluate:named"
    asked = [str(run_dir), "--tasks", "7", "--by-class", *flags]
    evaluation.main([*asked, "--data", data])
    out, err = capsys.readouterr()
    assert err.endswith(f"written to {run_dir}/evaluations.jsonl and {run_dir}/by_class.csv\n")
    with (run_dir / "by_class.csv").open() as file:
        found = {(row["true"], row["predicted"]): int(row["count"]) for row in csv.DictReader(file)}
    model, tasks = maml.load(run_dir), maml.episodes(data, ways=3, queries=2)
    counts: Counter[tuple[str, str]] = Counter()
    for id in range(7):
        task = tasks.task(id)
        (names,) = tasks.episodes.names(torch.tensor([id])) or [[]]
        adapted = model.adapt(task.support_x, task.support_y)
        answers = adapted.predict(task.query_x, "support" if flags else "query").argmax(1)
        pairs = zip(task.query_y.tolist(), answers.tolist(), strict=True)
        counts.update((names[true], names[answer]) for true, answer in pairs)
    assert found == counts
    (row,) = rows(run_dir)
    right = sum(n for (true, answer), n in counts.items() if true == answer)
    accuracy = row["non_transductive_accuracy" if flags else "accuracy"]
    assert right / (7 * 3 * 2) == pytest.approx(accuracy)

    first, heading, *lines = out.splitlines()
    assert first.startswith("iteration 2: test accuracy ")
    columns = ["class", "queries", "accuracy", "most often taken for"]
    assert re.split(r" {2,}", heading) == columns
    assert [line[:8].strip() for line in lines] == ["owl", "cat", "dog, wet", "eel"]
    for line in lines:
        name = line[:8].strip()
        asked_of = sum(n for (true, _), n in counts.items() if true == name)
        wrong = {other: n for (true, other), n in counts.items() if name == true != other}
        most = [f"{other} ({n})" for other, n in wrong.items() if n == max(wrong.values())]
        share = f"{100 * counts[name, name] / asked_of:.2f} %"
        assert re.fullmatch(rf" +{asked_of} +{share}  .*", line[8:])
        assert any(line.endswith(f"  {each}") for each in most or ["–"])
    # Classes without names have numbers, and those that no task had are listed, too.
    evaluation.main(asked)
    first, heading, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(n) for n in range(len(lines))]
    assert sum(int(line.split()[1]) for line in lines) == 7 * 3 * 2
    assert any(line.split()[1:] == ["0", "–", "–"] for line in lines)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (sinusoid(iterations=1), "the tasks of --data sinusoid have no classes"),
        (supervised(iterations=1), "it is not known which classes the tasks of --learner superv"),
        (
            with_values(PRESETS["maml-navigation"], iterations=1, test_tasks=0, threads=1),
            "the tasks of --data navigation have no classes",
        ),
    ],
    ids=["regression", "batches", "policy"],
)
def test_by_class_where_no_class_is_known(config: Config, says: str) -> None:
    with pytest.raises(UserError, match=f"^--by-class: {says}"):
        by_class.check(Worker(config, torch.device("cpu"), trains=False), "test")


def test_by_class_of_outputs_that_are_no_numbers() -> None:
    """The first class would be the answer to all."""
    learner = build_learner(glyphs())
    tasks = learner.open_tasks("test", evaluation=True).tasks(torch.arange(2))
    params = {name: tensor * math.nan for name, tensor in learner.meta_parameters().items()}
    with pytest.raises(UserError, match=r"^--by-class: the model's outputs are no numbers"):
        of_learner.confusions(learner, params, tasks, transductive=True)


@pytest.mark.usefixtures("no_pictures")
def test_an_ensemble_is_reported_beside_the_single_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MAML++'s: the mean of the logits of those that validated best, each adapted by itself."""
    config = glyphs(iterations=4, eval_every=1, checkpoint_every=1, keep_checkpoints=1, keep_best=3)
    train(config, tmp_path)
    evaluation.main([str(tmp_path), "--tasks", "5", "--ensemble", "2"])
    evaluation.main([str(tmp_path), "--tasks", "5"])
    row, single = rows(tmp_path)
    assert {name: row[name] for name in single if name != "time"}.items() <= single.items()

    validated = [row for row in metrics(tmp_path) if row.get("split") == "validation"]
    validated.sort(key=lambda row: (row["accuracy"], row["iteration"]), reverse=True)
    assert row["ensemble"] == [one["iteration"] for one in validated[:2]]
    learner = build_learner(config)
    tasks = learner.open_tasks("test", evaluation=True).tasks(torch.arange(5))
    answers = []
    for iteration in row["ensemble"]:
        saved = checkpoint.load(checkpoint.numbered_checkpoint(tmp_path, iteration))
        answers.append(learner.predictions(saved["model"], tasks, config.eval_inner_steps))
    assert (answers[0].transductive - answers[1].transductive).abs().max() > 1e-4
    for prefix, outputs in zip(("", "non_transductive_"), zip(*answers, strict=True), strict=True):
        logits = (outputs[0] + outputs[1]) / 2
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tasks.query_y)
        assert row[f"ensemble_{prefix}loss"] == pytest.approx(loss.item(), rel=1e-5)
        right = (logits.argmax(-1) == tasks.query_y).double().mean().item()
        assert row[f"ensemble_{prefix}accuracy"] == pytest.approx(right, abs=1e-7)
    out, err = capsys.readouterr()
    first, second, third = (
        line for line in out.splitlines() if "test accuracy" in line and "iter" in line
    )
    assert first == third and first.startswith("iteration 4: test accuracy")
    who = "ensemble of iterations {}, {}: test accuracy".format(*row["ensemble"])
    assert second.startswith(who)
    with pytest.raises(UserError, match=r"--ensemble 5: .*--keep-best 5"):
        evaluation.main([str(tmp_path), "--ensemble", "5"])
    # A model whose answers are no numbers has an accuracy, alone or together with others.
    warning = "warning: the test loss is not finite: the model's answers are no numbers\n"
    assert warning not in err
    one = checkpoint.numbered_checkpoint(tmp_path, row["ensemble"][0])
    for path in (one, checkpoint.last_checkpoint(tmp_path)):
        saved = checkpoint.load(path)
        nan = {name: tensor * math.nan for name, tensor in saved["model"].items()}
        checkpoint.save(path, saved | {"model": nan})
        evaluation.main([str(tmp_path), "--tasks", "5", "--ensemble", "2"])
        assert capsys.readouterr().err.count(warning) == 1


def test_bad_requests(run_dir: Path, tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        with pytest.raises((UserError, DataError)) as caught:
            evaluation.main(list(arguments))
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    missing = tmp_path / "missing"
    assert str(missing) in refusal(str(missing))
    assert "--tasks must be at least 1" in refusal(str(run_dir), "--tasks", "0")
    assert "--tasks must be at most 2147483647" in refusal(str(run_dir), "--tasks", str(2**31))
    assert '--data-root ""' in refusal(str(run_dir), "--data-root", "")
    assert "--device nonsense" in refusal(str(run_dir), "--device", "nonsense")
    saved = run_dir / "checkpoints" / "last.pt"
    content = saved.read_bytes()
    saved.write_bytes(content[:-50])
    assert str(saved) in refusal(str(run_dir))
    saved.unlink()
    assert str(saved) in refusal(str(run_dir))
    saved.write_bytes(content)
    for arguments, line in {
        ("--steps", "-1"): "--steps must be at least 0",
        ("--ways", "7"): "--ways 7: the parameters of --learner maml tell 3 classes apart",
        ("--queries", "0"): "--queries must be at least 1",
        ("--shots", "30"): "--shots 30 and --eval-queries 2",
        ("--queries", "30"): "--queries 30: they need 31 images",
        ("--iteration", "7"): "--iteration 7: no checkpoint of it",
        ("--iteration", "best"): "--iteration best: no kept checkpoint was validated",
        ("--ensemble", "1"): "--ensemble must be at least 2",
        ("--ensemble", "2", "--watch"): "--ensemble: --watch evaluates every checkpoint",
        ("--poll", "0", "--watch"): "--poll must be positive and finite, not 0.0",
        ("--patience", "3"): "--patience goes with --watch",
        ("--by-class", "--watch"): "--by-class: --watch evaluates every checkpoint",
        ("--iteration", "2", "--watch"): "--iteration: --watch evaluates every checkpoint",
        ("--data", "glyfs"): "--data glyfs",
        ("--dat", "glyphs"): "--dat",
        ("--data", "sinusoid"): "--network conv4 takes images",
    }.items():
        assert line in refusal(str(run_dir), *arguments)
    config = run_dir / "config.yaml"
    for text in ("config: {ways: 5, no_such_field: 1}\n", "a: [1\n", "", "- 1\n", "config: 3\n"):
        config.write_text(text)
        assert str(config) in refusal(str(run_dir))
    config.unlink()
    (run_dir / "evaluations.jsonl").mkdir()
    assert refusal(str(run_dir)) == f"{run_dir}/evaluations.jsonl: is a folder"
    (run_dir / "evaluations.jsonl").rmdir()
    (run_dir / "by_class.csv").mkdir()
    assert refusal(str(run_dir), "--by-class") == f"{run_dir}/by_class.csv: is a folder"


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        (b"ways: 3", b"ways: five", r"ways: 'five' is not int"),
        (b"ways: 3", b"ways: 0", r"--ways must be at least 1, not 0"),
        (b"ways: 3", b"ways: true", r"ways: True is not int"),
        (b"ways: 3", b"ways: 2147483648", r"--ways must be at most 2147483647"),
        (b"ways: 3", b"ways: null", r"ways: None is not int"),
        (b"inner_lr: 0.4", b"inner_lr: .nan", r"--inner-lr must be positive and finite"),
        (b"grad_clip: null", b"grad_clip: [1]", r"grad_clip: \[1\] is not float \| None"),
        (b"data: glyphs", b"data: imagenet", r"--data imagenet: unknown; .*glyphs, .*omniglot"),
        (b"data: glyphs", b"data: sinusoid", r"--network conv4 cannot learn --data sinusoid"),
        (b"data: glyphs", b"data: gl\xffphs", r"can't decode byte 0xff"),
        (b"data: glyphs", b"data: 2026-99-99", r"month must be in"),
        (b"seed: 0", b"3: 0", r"unknown field 3"),
    ],
    ids=lambda value: value.decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_a_configuration_that_cannot_be(
    then: bytes, now: bytes, says: str, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "config.yaml"
    whole = path.read_bytes()
    assert whole.count(b"  " + then + b"\n") == 1
    path.write_bytes(whole.replace(b"  " + then + b"\n", b"  " + now + b"\n"))
    with pytest.raises(SystemExit) as stop:
        run_program(evaluation.main, [str(run_dir), "--tasks", "2"])
    assert stop.value.code == 2
    line = rf"error: {path}: not a configuration of this version: [^\n]*{says}[^\n]*\n"
    assert re.fullmatch(line, capfd.readouterr().err)


def test_more_threads_than_are_served_here(run_dir: Path) -> None:
    """Trained where there are more cores: that is no reason not to evaluate."""
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("threads: 1\n", f"threads: {most_threads() + 1}\n"))
    evaluation.main([str(run_dir), "--tasks", "2"])
    assert torch.get_num_threads() <= most_threads()


def test_evaluations_that_cannot_be_written(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are shown all the same, so no hour of evaluation is lost."""
    (run_dir / "evaluations.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"evaluations\.jsonl: .*No space left"):
        evaluation.main([str(run_dir), "--tasks", "2"])
    assert "iteration 2: test accuracy " in capsys.readouterr().out


def test_as_a_command(run_dir: Path, cache_dir: Path) -> None:
    environment = {"MAML_CACHE": str(cache_dir)}
    command = [sys.executable, "-m", "maml.evaluate"]
    done = run([*command, str(run_dir), "--tasks", "8"], 60, env=environment)
    assert re.fullmatch(r"iteration 2: test accuracy .* over 8 tasks.*\n", done.stdout)
    assert rows(run_dir)[0]["accuracy"] == result(run_dir)["accuracy"]
    assert "Traceback" not in done.stderr


def test_missing_directory_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_program(evaluation.main, [str(tmp_path / "missing")])
    assert stop.value.code == 2
    out, err = capfd.readouterr()
    assert re.fullmatch(rf"error: {tmp_path}/missing/config.yaml: [^\n]*\n", err)
    assert out == ""
