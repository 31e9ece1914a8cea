"""What a run leaves behind."""

import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from maml import evaluate
from maml.errors import UserError
from maml.evaluation.scores import mean_and_ci95
from maml.plots import __main__ as plots
from maml.run import provenance
from maml.run.directory import choose, write_config, write_json
from maml.run.files import append_row, read_json, read_tasks
from tests.runs import glyphs, metrics, refused, result, sinusoid, train

# 5 iterations, rows every 2 and at the end, validations every 2, a test.
CONFIG = glyphs(iterations=5, log_every=2, eval_every=2, eval_tasks=4, test_tasks=6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "not" / "there" / "yet"
    train(CONFIG, directory)
    return directory


def test_files(finished: Path) -> None:
    """Exactly these: nothing missing and no temporary file."""
    files = [path for path in finished.rglob("*") if not path.is_dir()]
    assert sorted(str(path.relative_to(finished)) for path in files) == [
        ".lock", "checkpoints/iteration-00000005.pt", "checkpoints/last.pt", "config.yaml",
        "curves.png", "metrics.jsonl", "result.json", "status.json", "test_tasks.csv",
    ]  # fmt: skip


def test_training_rows(finished: Path) -> None:
    rows = [row for row in metrics(finished) if "split" not in row]
    assert [row["iteration"] for row in rows] == [2, 4, 5]
    validations = [row for row in metrics(finished) if row.get("split") == "validation"]
    assert [(row["iteration"], row["tasks"]) for row in validations] == [(2, 4), (4, 4)]
    for row in rows:
        assert row.keys() == {
            "iteration", "loss", "accuracy", "tasks_per_second", "seconds", "gradient_norm", "time",
        }  # fmt: skip
        assert 0 <= row["accuracy"] <= 1
        assert min(row["loss"], row["tasks_per_second"], row["gradient_norm"]) > 0
        assert row["time"].keys() == {"sampling", "computing", "updating", "elsewhere"}
        assert min(row["time"].values()) >= 0 < row["time"]["computing"]
    seconds = [0, *(row["seconds"] for row in rows)]
    assert seconds == sorted(set(seconds))


def test_result(finished: Path, tmp_path: Path) -> None:
    found = result(finished)
    contract = {
        "accuracy", "ci95", "interval95", "tasks", "transductive", "non_transductive_accuracy",
        "preset", "published", "seconds", "tasks_per_second",
    }  # fmt: skip
    assert contract <= found.keys()
    assert (found["tasks"], found["transductive"], found["preset"]) == (6, True, CONFIG.preset)
    assert found["published"] is CONFIG.published is None
    # The changes to the preset: with them, its published number does not apply.
    changed = found["changed"]
    assert (changed["iterations"], changed["test_tasks"], changed["ways"]) == (5, 6, 2)
    assert {"dtype", "seed", "strategy", "run_dir", "log_every"}.isdisjoint(changed)
    assert found["iterations"] == 5
    tasks = 5 * CONFIG.meta_batch_size
    assert found["tasks_per_second"] == pytest.approx(tasks / found["seconds"], rel=1e-9)
    low, high = found["interval95"]
    assert 0 <= low < found["accuracy"] - found["ci95"] + 1e-9 and found["accuracy"] < high <= 1
    train(sinusoid(test_tasks=1), tmp_path)
    assert result(tmp_path)["interval95"] is None
    assert result(tmp_path)["accuracy"] is None and result(tmp_path)["loss"] > 0


def test_each_test_task_is_kept(finished: Path) -> None:
    """The means of the scores in the file are those of result.json, to the bit."""
    found, scores = result(finished), read_tasks(finished / "test_tasks.csv")
    assert list(scores) == [("test", CONFIG.seed, index) for index in range(6)]
    for name in scores["test", 0, 0]:
        column = torch.tensor([row[name] for row in scores.values()])
        shown = {"accuracy": "transductive_accuracy", "loss": "transductive_loss"}.get(name, name)
        assert found[shown] == mean_and_ci95(column)[0], name


def test_damaged_scores_of_tasks_are_named(tmp_path: Path) -> None:
    path = tmp_path / "test_tasks.csv"
    damaged = dict.fromkeys(("test,0,1", "test,0,x,0.5", "test,0,0,0.5,7"), " is damaged")
    for row, message in {**damaged, "test,0,0,0.5": r": task .* is there twice"}.items():
        path.write_text(f"split,seed,index,accuracy\ntest,0,0,0.5\n{row}\n")
        with pytest.raises(UserError, match=f"{path}: line 3{message}"):
            read_tasks(path)


def test_only_a_repository_that_tracks_the_code_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ("init -q", "commit -q --allow-empty -m mine"):
        subprocess.run([*git, *words.split()], check=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.git_commit() is None


def test_odd_values_are_text(tmp_path: Path) -> None:
    """A checkpoint could not hold what YAML makes of a date."""
    path, config = tmp_path / "config.yaml", sinusoid()
    write_config(tmp_path, config)
    path.write_text(re.sub("- time: .*", "- time: 2026-11-27 10:00:00", path.read_text()))
    assert write_config(tmp_path, config)[0]["time"] == "2026-11-27 10:00:00"
    # A name that is not UTF-8 is kept.
    write_json(tmp_path / "result.json", {"init": "caf\udce9"})
    assert read_json(tmp_path / "result.json", {}) == {"init": "caf\udce9"}


def test_a_run_writes_nowhere_else(tmp_path: Path) -> None:
    """A stranger's directory may have links in it. Its user may keep the whole one elsewhere."""
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "link"
    (elsewhere / "run").mkdir(parents=True)
    run_dir.symlink_to(elsewhere / "run")
    train(sinusoid(), run_dir)
    before = sorted(elsewhere.iterdir())
    for name in ("checkpoints", "metrics.jsonl", "nonfinite", "wandb", "tensorboard"):
        path, aside = run_dir / name, run_dir / "aside"
        if path.exists():
            path.rename(aside)
        path.symlink_to(elsewhere / name)
        said = refused(train, sinusoid(iterations=3), run_dir)
        assert said == f"{path}: is a symbolic link, so nothing is written there: remove it"
        path.unlink()
        if aside.exists():
            aside.rename(path)
    (run_dir / "evaluations.jsonl").symlink_to(elsewhere / "rows")
    (run_dir / "plots").symlink_to(elsewhere / "plots")
    for program, name in ((evaluate, "evaluations.jsonl"), (plots, "plots")):
        assert f"{run_dir / name}: is a symbolic link" in refused(program.main, [str(run_dir)])
    said = refused(append_row, run_dir / "evaluations.jsonl", {"iteration": 1})
    assert "evaluations.jsonl: cannot write: is a symbolic link" in said
    # What is replaced as a whole, and temporary files, do not go there either.
    for name in ("status.json", "config.yaml", "checkpoints/last.pt"):
        content = (run_dir / name).read_bytes()
        (elsewhere / "theirs").write_bytes(content)
        (run_dir / name).unlink()
        (run_dir / name).symlink_to(elsewhere / "theirs")
        train(sinusoid(iterations=3), run_dir)
        assert (elsewhere / "theirs").read_bytes() == content
        (elsewhere / "theirs").unlink()
    assert sorted(elsewhere.iterdir()) == before


def test_default_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the same second get different names; a launcher's restart gets the same name."""
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
