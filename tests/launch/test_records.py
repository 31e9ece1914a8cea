"""What is kept of a run: written from its directory, checked task by task, shown in the table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from launch import check_record, record, recorded, table
from maml.errors import UserError
from maml.run import provenance
from maml.trainer import Trainer
from tests.launching import REPO
from tests.runs import glyphs


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    with pytest.MonkeyPatch.context() as patched:
        # This checkout may have changes, which a record refuses.
        patched.setattr(provenance, "git_commit", lambda: "c0ffee")
        patched.setattr("maml.run.directory.git_commit", lambda: "c0ffee")
        assert Trainer(glyphs(test_tasks=6, run_dir=str(run_dir), iterations=3)).run() == 0
    return run_dir


@pytest.fixture
def kept(run_dir: Path, tmp_path: Path) -> Path:
    return record.write(run_dir, tmp_path, 10, "none", None)


def test_what_was_kept_scores_what_it_says(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_record.main([str(kept), "--tasks", "10"]) == 0
    assert "10 tasks score what it says" in capsys.readouterr().out
    (row,) = [line for line in table.table(kept.parents[1]).splitlines() if "other" in line]
    one = recorded.read(kept)
    assert f"{100 * one.result['accuracy']:.2f} ± " in row, row
    assert "not run" in table.table(kept.parents[1])


def test_nothing_of_the_machine_is_kept(kept: Path, run_dir: Path) -> None:
    text = "".join(
        path.read_text() for path in kept.iterdir() if path.suffix in (".json", ".yaml", ".jsonl")
    )
    assert str(run_dir) not in text
    assert str(REPO) not in text


def test_another_model_is_found(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = torch.load(kept / "model.pt", weights_only=True)
    torch.save({name: tensor * 1.1 for name, tensor in params.items()}, kept / "model.pt")
    with pytest.raises(UserError, match=r"model.pt: not the file that was recorded"):
        check_record.main([str(kept)])
    made = json.loads((kept / "record.json").read_text())
    made["model_sha256"] = recorded.digest_of(kept / "model.pt")
    (kept / "record.json").write_text(json.dumps(made))
    assert check_record.main([str(kept), "--tasks", "6"]) == 1
    assert "tasks differ; the first is task 0: loss was" in capsys.readouterr().out


def test_what_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("c0ffee", "c0ffee-dirty"))
    with pytest.raises(UserError, match="made by c0ffee-dirty: not a commit alone"):
        record.write(copy, tmp_path, 6, "", None)
    (copy / "config.yaml").write_text(config)
    scores = (copy / "test_tasks.csv").read_text().replace(",0.", ",1.")
    (copy / "test_tasks.csv").write_text(scores)
    with pytest.raises(UserError, match="its last checkpoint does not score what it says"):
        record.write(copy, tmp_path, 6, "", None)
    with pytest.raises(UserError, match="no record there"):
        recorded.find(copy)
