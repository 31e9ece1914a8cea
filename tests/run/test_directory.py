"""What a run leaves behind."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from maml.config import Config
from maml.config.cli import parse
from maml.config.presets import with_values
from maml.errors import UserError
from maml.evaluation.scores import mean_and_ci95
from maml.run.directory import choose, read_config, write_config
from maml.run.task_scores import read_tasks
from maml.trainer import Trainer
from tests.launching import REPO
from tests.runs import glyphs, metrics, result, same, sinusoid, train

# 5 iterations, rows every 2 and at the end, validations every 2, a test.
VALUES: dict[str, Any] = {
    "iterations": 5, "log_every": 2, "eval_every": 2, "eval_tasks": 4, "test_tasks": 6,
}  # fmt: skip


class Finished(NamedTuple):
    directory: Path
    config: Config
    checkpoint: dict[str, Any]


@pytest.fixture(scope="module", params=[sinusoid, glyphs], ids=["sinusoid", "glyphs"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("run") / "not" / "there" / "yet"
    config = request.param(**VALUES)
    return Finished(directory, config, train(config, directory))


def test_files(finished: Finished) -> None:
    """Exactly these: nothing missing and no temporary file."""
    files = [path for path in finished.directory.rglob("*") if not path.is_dir()]
    assert sorted(str(path.relative_to(finished.directory)) for path in files) == [
        ".lock", "checkpoints/iteration-00000005.pt", "checkpoints/last.pt", "config.yaml",
        "curves.pdf", "curves.png", "metrics.jsonl", "result.json", "status.json", "test_tasks.csv",
    ]  # fmt: skip


def test_config_is_resolved(finished: Finished) -> None:
    resolved = with_values(
        finished.config,
        run_dir=str(finished.directory),
        strategy="local",
        batching="vmap",
        resume="auto",
    )
    assert read_config(finished.directory) == resolved


def test_config_names_versions_and_commit(finished: Finished) -> None:
    content = yaml.safe_load((finished.directory / "config.yaml").read_text())
    assert content["config"]["meta_batch_size"] == finished.config.meta_batch_size
    assert content["versions"]["python"] == platform.python_version()
    for package in ("torch", "torchopt", "numpy"):
        assert content["versions"][package] == metadata.version(package)
    git = subprocess.run(
        ["git", "-C", str(REPO), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if git.returncode:
        assert content["git_commit"] is None
    else:
        assert content["git_commit"].removesuffix("-dirty") == git.stdout.strip()


def test_training_rows(finished: Finished) -> None:
    rows = [row for row in metrics(finished.directory) if "split" not in row]
    assert [row["iteration"] for row in rows] == [2, 4, 5]
    names = {"iteration", "loss", "tasks_per_second", "seconds", "gradient_norm", "time"}
    if finished.config.data != "sinusoid":
        names |= {"accuracy"}
        assert all(0 <= row["accuracy"] <= 1 for row in rows)
    for row in rows:
        assert row.keys() == names
        assert row["loss"] > 0
        assert row["tasks_per_second"] > 0
        assert row["gradient_norm"] > 0
        assert row["time"].keys() == {"sampling", "computing", "updating", "elsewhere"}
        assert min(row["time"].values()) >= 0 < row["time"]["computing"]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_a_row_is_the_mean_since_the_last_one(tmp_path: Path) -> None:
    config = sinusoid(dtype="float64", iterations=5, log_every=1)
    train(config, tmp_path / "each")
    train(config, tmp_path / "few", log_every=3)
    losses = [row["loss"] for row in metrics(tmp_path / "each")]
    first, second = (row["loss"] for row in metrics(tmp_path / "few"))
    assert first == pytest.approx(sum(losses[:3]) / 3, rel=1e-12)
    assert second == pytest.approx(sum(losses[3:]) / 2, rel=1e-12)


def test_result(finished: Finished) -> None:
    found, config = result(finished.directory), finished.config
    contract = {
        "accuracy", "ci95", "tasks", "transductive", "non_transductive_accuracy", "preset",
        "published", "seconds", "tasks_per_second",
    }  # fmt: skip
    assert contract <= found.keys()
    assert (found["tasks"], found["transductive"], found["preset"]) == (6, True, config.preset)
    assert found["published"] is config.published is None
    # As given on top of the preset: with these, its published number is another experiment's.
    changed = found["changed"]
    assert (changed["iterations"], changed["test_tasks"]) == (5, 6)
    assert ("ways" in changed) == (config.data == "glyphs")
    assert {"dtype", "seed", "strategy", "run_dir", "log_every"}.isdisjoint(changed)
    assert found["iterations"] == 5
    assert found["tasks_per_second"] == pytest.approx(
        5 * config.meta_batch_size / found["seconds"], rel=1e-9
    )
    assert found["ci95"] >= 0
    if config.data == "sinusoid":
        assert found["accuracy"] is found["non_transductive_accuracy"] is None
        assert found["loss"] > 0
    else:
        # A mean over 6 tasks of 4 queries each.
        for name in ("accuracy", "non_transductive_accuracy"):
            assert 24 * found[name] == pytest.approx(round(24 * found[name]), abs=1e-4)


def test_each_test_task_is_kept(finished: Finished) -> None:
    """To the bit: the means of what is read are those of result.json."""
    found, scores = result(finished.directory), read_tasks(finished.directory / "test_tasks.csv")
    assert list(scores) == [("test", finished.config.seed, index) for index in range(6)]
    for name in scores["test", 0, 0]:
        column = torch.tensor([row[name] for row in scores.values()])
        shown = {"accuracy": "transductive_accuracy", "loss": "transductive_loss"}.get(name, name)
        assert found[shown] == mean_and_ci95(column)[0], name


def test_config_repeats_a_run(finished: Finished, tmp_path: Path) -> None:
    """`--config` of the file or its folder: the same bits; flags are given on top of it."""
    config = parse([f"--config={finished.directory / 'config.yaml'}", "--run-dir", str(tmp_path)])
    assert config == with_values(
        finished.config, run_dir=str(tmp_path), strategy="local", batching="vmap"
    )
    assert same(train(config, tmp_path)["model"], finished.checkpoint["model"])
    assert not metrics(tmp_path)[0].keys() ^ metrics(finished.directory)[0].keys()
    other = parse(["--config", str(finished.directory), "--seed", "3"])
    assert other == with_values(finished.config, seed=3, strategy="local", batching="vmap")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("split,seed,accuracy\n", "first line"),
        ("split,seed,index,accuracy\ntest,0,0,0.5\ntest,0,1\n", "line 3 is damaged"),
        ("split,seed,index,accuracy\ntest,0,0,0.5\ntest,0,0,0.5\n", "there twice"),
    ],
)
def test_damaged_scores_of_tasks_are_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "test_tasks.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path}.*{says}"):
        read_tasks(path)


def test_no_iterations_at_all(tmp_path: Path) -> None:
    """Tests the initial weights: whoever asks for it gets everything but rows of training."""
    saved = train(sinusoid(iterations=0, test_tasks=4), tmp_path)
    assert saved["iteration"] == 0
    assert result(tmp_path)["tasks_per_second"] is None
    assert (tmp_path / "curves.png").exists()
    assert [row["split"] for row in metrics(tmp_path)] == ["test"]


def test_home_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not expand ``--run-dir="~/run"``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose(sinusoid(run_dir="~/run")) == tmp_path / "run"
    assert (tmp_path / "run").is_dir()


def test_default_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one second they differ; a launcher's later start has that of the earlier one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    # Longer than a line of YAML, which is folded.
    monkeypatch.setattr(platform, "node", lambda: f"node-7.{'partition.' * 12}example.org")

    def begin(name: str) -> None:
        path = choose(sinusoid())
        assert path.name == f"maml-sinusoid-10shot-now{name}"
        write_config(path, sinusoid())

    begin("")
    begin("-2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    begin("-3")
    begin("-3")
    # In a container that is started again, torchrun is process 1 of the same host each time.
    monkeypatch.setattr("maml.run.directory.started", lambda pid: "later")
    begin("-4")
    Path("runs/maml-sinusoid-10shot-now-4/config.yaml").write_text("starts: 3\n")
    begin("-5")


def test_non_transductive_headline_is_consistent(tmp_path: Path) -> None:
    config = glyphs(transductive=False, test_tasks=6, run_dir=str(tmp_path))
    assert Trainer(config).run() == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["transductive"] is False
    for name in ("accuracy", "accuracy_ci95", "loss", "loss_ci95"):
        assert result[name] == result[f"non_transductive_{name}"]
    assert result["ci95"] == result["accuracy_ci95"]
    assert result["loss"] != result["transductive_loss"]
