"""Evaluation: the interval, what it may depend on, and the command."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from maml import evaluate as evaluation
from maml.config.checks import most_threads
from maml.config.presets import with_values
from maml.errors import UserError
from maml.evaluation.scores import evaluate, mean_and_ci95
from maml.learners import build_learner
from maml.processes.program import run_program
from maml.run import checkpoint
from maml.run.files import read_rows
from maml.strategies.local import alone
from tests.runs import glyphs, last, metrics, refused, result, train

# ---- what a result depends on -----------------------------------------------------------------


def test_is_the_mean_over_its_tasks_whatever_the_batches() -> None:
    config = glyphs(dtype="float64", device="cpu")
    strategy = alone(config)
    params = strategy.worker.learner.meta_parameters()
    found = evaluate(strategy, params, "validation", 9)
    rows = strategy.evaluate(params, "validation", torch.arange(9)).numpy()
    for name, column in zip(strategy.worker.evaluation_names, rows.T, strict=True):
        assert found[name] == pytest.approx(column.mean(), rel=1e-12)
        exact = 1.96 * column.std(ddof=1) / 3
        assert found[f"{name}_ci95"] == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert (found.pop("split"), found["tasks"]) == ("validation", 9)
    for batch in (1, 4):
        other = evaluate(alone(with_values(config, task_batch=batch)), params, "validation", 9)
        assert other.pop("split") and other == pytest.approx(found, rel=1e-9, abs=1e-12)
    # One task has no interval: null in JSON, which has no NaN.
    assert mean_and_ci95(torch.tensor([0.25])) == (0.25, None)


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


def test_agrees_with_the_end_of_training(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation.main([str(run_dir), "--tasks", "8"])
    (row,) = read_rows(run_dir / "evaluations.jsonl")
    trained = result(run_dir)
    for name in ("loss", "accuracy", "accuracy_ci95", "non_transductive_accuracy"):
        assert row[name] == trained[name], name
    assert row["transductive"] is True
    assert row["iteration"] == last(run_dir)["iteration"] == 2
    (line,) = capsys.readouterr().out.splitlines()
    accuracy = f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_ci95']:.2f} % (transductive)"
    assert line.startswith(f"iteration 2: test accuracy {accuracy}")
    assert line.endswith("over 8 tasks, 3-way 1-shot, 2 queries per class, 1 inner step")
    evaluation.main([str(run_dir), "--tasks", "5", "--non-transductive"])
    other = read_rows(run_dir / "evaluations.jsonl")[1]
    assert (other["tasks"], other["split"], other["transductive"]) == (5, "test", False)
    share = 100 * other["non_transductive_accuracy"]
    said = rf"iteration 2: test accuracy {share:.2f} ± \S+ % \(non-trans"
    assert re.match(said, capsys.readouterr().out)


def test_what_is_asked_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other steps, shots and queries; the checkpoint that validated best, or a given one.

    An ensemble, as MAML++'s, is scored next to the single model. It is the mean of the logits of
    the checkpoints that validated best. Each of them adapts separately.
    """
    config = glyphs(iterations=4, eval_every=1, checkpoint_every=1)
    train(config, tmp_path)
    validated = [row for row in metrics(tmp_path) if row.get("split") == "validation"]
    validated.sort(key=lambda row: (row["accuracy"], -row["loss"]), reverse=True)
    best, second = (row["iteration"] for row in validated[:2])
    otherwise = "--steps 4 --shots 2 --queries 3 --split validation"
    for asked in ("--iteration best", "--iteration 1", otherwise, "--ensemble 2", ""):
        evaluation.main([str(tmp_path), "--tasks", "4", *asked.split()])
    *found, row, single = read_rows(tmp_path / "evaluations.jsonl")
    assert [row["iteration"] for row in found] == [best, 1, 4]
    assert (found[2]["eval_inner_steps"], found[2]["shots"], found[2]["eval_queries"]) == (4, 2, 3)
    like = with_values(config, eval_inner_steps=4, shots=2, eval_queries=3, device="cpu")
    params = last(tmp_path)["model"]
    expected = evaluate(alone(like), params, "validation", 4)
    assert found[2]["loss"] == pytest.approx(expected["loss"], rel=1e-6)

    assert {name: row[name] for name in single if name != "time"}.items() <= single.items()
    assert row["ensemble"] == [best, second]
    learner = build_learner(config)
    tasks = learner.open_tasks("test", evaluation=True).tasks(torch.arange(4))
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
    out = capsys.readouterr().out
    assert "ensemble of iterations {}, {}: test accuracy".format(*row["ensemble"]) in out
    with pytest.raises(UserError, match=r"--ensemble 5: .*--keep-best 5, .*--eval-every"):
        evaluation.main([str(tmp_path), "--ensemble", "5"])


def test_bad_requests(run_dir: Path, tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        return refused(evaluation.main, list(arguments))

    missing = tmp_path / "missing"
    assert f"{missing}/config.yaml: " in refusal(str(missing))
    saved = run_dir / "checkpoints" / "last.pt"
    content = saved.read_bytes()
    saved.write_bytes(content[:-50])
    assert str(saved) in refusal(str(run_dir))
    saved.unlink()
    assert str(saved) in refusal(str(run_dir))
    saved.write_bytes(content)
    for arguments, line in {
        ("--tasks", "0"): "--tasks must be at least 1",
        ("--data-root", ""): '--data-root ""',
        ("--device", "nonsense"): "--device nonsense",
        ("--ways", "7"): "--ways 7: the parameters of --learner maml tell 3 classes apart",
        ("--queries", "30"): "--eval-queries 30: they need 31 images",
        ("--iteration", "7"): "--iteration 7: there is no such checkpoint",
        ("--iteration", "best"): "--iteration best: no kept checkpoint was validated",
        ("--ensemble", "1"): "--ensemble must be at least 2",
        ("--ensemble", "2", "--watch"): "--ensemble: --watch evaluates every checkpoint",
    }.items():
        assert line in refusal(str(run_dir), *arguments)
    (run_dir / "evaluations.jsonl").mkdir()
    assert refusal(str(run_dir)) == f"{run_dir}/evaluations.jsonl: is a folder"


def test_a_configuration_that_cannot_be(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "config.yaml"
    whole = path.read_bytes()
    for then, now, says in (
        (b"ways: 3", b"ways: five", r"ways: 'five' is not int"),
        (b"ways: 3", b"ways: 0", r"--ways must be at least 1, not 0"),
        (b"preset: maml", b"preset: ../maml", r"preset '\.\./maml-.*': cannot name a folder"),
        (b"data: glyphs", b"data: imagenet", r"--data imagenet: unknown; .*glyphs, .*omniglot"),
        (b"data: glyphs", b"data: gl\xffphs", r"can't decode byte 0xff"),
        (b"seed: 0", b"precision: bf16", r"unknown field 'precision'"),
        (b"data: glyphs", b'data: "\\e[2J"', r"--data \\x1b\[2J: unknown"),
        (b"data: glyphs", b"data: " + 9999 * b"x", r" --data x{800,1000} … .{400}"),
        (b"seed: 0", b"seed: &s 0\nstarts: [*s]", r"an alias of YAML"),
        (whole, b"a: [1\n", ""),
    ):
        path.write_bytes(whole.replace(then, now))
        with pytest.raises(SystemExit) as stop:
            run_program(evaluation.main, [str(run_dir), "--tasks", "2"])
        assert stop.value.code == 2
        assert re.fullmatch(rf"error: {path}: [^\n]*{says}[^\n]*\n", capfd.readouterr().err)
    path.unlink()
    path.symlink_to("/dev/null")  # as a pipe or /dev/zero, which would not end
    with pytest.raises(UserError, match=f"^{path}: Not a regular file: not a run directory"):
        evaluation.main([str(run_dir)])


def test_more_threads_than_are_served_here(run_dir: Path) -> None:
    """A run from a machine with more cores can still be evaluated."""
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("threads: 1\n", f"threads: {most_threads() + 1}\n"))
    evaluation.main([str(run_dir), "--tasks", "2"])
    assert torch.get_num_threads() <= most_threads()
    evaluation.main([str(run_dir), "--tasks", "2", "--threads", "2"])
    assert torch.get_num_threads() == 2
    with pytest.raises(UserError, match=f"--threads must be at most {most_threads()}, "):
        evaluation.main([str(run_dir), "--threads", str(most_threads() + 1)])


def test_evaluations_that_cannot_be_written(
    run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results are printed anyway, so no hour of evaluation is lost."""
    build = evaluation.RunEvaluator.build

    def on_a_full_disk(self: Any, config: Any) -> None:
        build(self, config)
        self.rows = Path("/dev/full")

    monkeypatch.setattr(evaluation.RunEvaluator, "build", on_a_full_disk)
    with pytest.raises(UserError, match=r"^/dev/full: .*No space left"):
        evaluation.main([str(run_dir), "--tasks", "2"])
    assert "iteration 2: test accuracy " in capsys.readouterr().out
