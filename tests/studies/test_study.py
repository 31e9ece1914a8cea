"""Studies: what is kept of a sweep, from which its tables and others can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from maml.errors import UserError
from maml.run.directory import write_config
from maml.run.task_scores import write_tasks
from maml.studies import compare, study
from maml.studies import sweep as command
from tests.runs import glyphs
from tests.studies import sweeps
from tests.studies.test_sweep import FAKE

NAMES = ("loss", "accuracy", "non_transductive_loss", "non_transductive_accuracy")
EDGE = 0.05


def trained(run_dir: Path, seed: int, edge: float) -> None:
    """Leave in a trial's directory what a training by a clean commit would."""
    config = glyphs(seed=seed)
    write_config(run_dir, config)
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("-dirty", ""))
    # No two tasks differ by the same, or there would be nothing to test.
    scores = [0.5 + edge * (1 + (-1) ** i / 2) + 0.01 * (7 * i % 11) for i in range(40)]
    write_tasks(run_dir, "test", seed, NAMES, [[1 - a, a, 1 - a, a] for a in scores])


def test_a_sweep_is_kept_whole_and_compared_by_its_own_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"part": {"values": ["none", "all"]}, "seed": {"values": [0, 1]}}
    path = sweeps.written(tmp_path, command=FAKE, parameters=parameters, description="parts")
    there, kept = tmp_path / "there", tmp_path / "studies"
    asked = [str(there), "--against", "part=none", "--studies", str(kept)]
    assert command.main([str(path), "--trust", "--folder", str(there), "--total", "3"]) == 0
    with pytest.raises(UserError, match="there: 3 finished, 1 to come; all trials"):
        study.main(asked)
    assert command.main([str(path), "--trust", "--folder", str(there)]) == 0
    for number, (part, seed) in enumerate((p, s) for p in ("none", "all") for s in (0, 1)):
        trained(there / "trials" / f"{number:04d}", seed, EDGE if part == "all" else 0.0)
    with pytest.raises(UserError, match="no such setting; there are part=none, part=all"):
        study.main([str(there), "--against", "part=some", "--studies", str(kept)])
    assert study.main([*asked, "--note", "By hand."]) == 0
    (folder,) = kept.iterdir()
    assert folder.name == "there" and str(folder) in capsys.readouterr().out
    shown, report = study.table(folder), (folder / "report.md").read_text()
    assert shown in report and report.startswith("# parts\n") and "By hand." in report
    row = next(line for line in shown.splitlines() if line.startswith("| part=all") and "+" in line)
    assert f"{100 * EDGE:+.2f}" in row and "holds over seeds" in row
    assert (folder / "differences.png").stat().st_size > 1000
    # The sweep and what was kept of it give the same, whichever is the first.
    said = []
    for runs in (there, folder):
        assert compare.main([f"{runs}:part=all", f"{runs}:part=none"]) == 0
        said.append(capsys.readouterr().out.replace(str(runs), "RUNS").split())
    words = [[word for word in each if set(word) != {"-"}] for each in said]
    assert words[0] == words[1] and f"{-100 * EDGE:+.2f}" in said[0]
    # Nothing is kept of what no commit made; the earlier study stays.
    config = there / "trials" / "0003" / "config.yaml"
    commit = next(x for x in config.read_text().splitlines() if x.startswith("git_commit"))
    config.write_text(config.read_text().replace(commit.split()[1], commit.split()[1] + "-dirty"))
    with pytest.raises(UserError, match=r"0003: made by .*-dirty: not a commit alone"):
        study.main(asked)
    assert study.table(folder) == shown and list(kept.iterdir()) == [folder]
    with pytest.raises(UserError, match="no sweep there"):
        study.main([str(folder), "--against", "part=none"])
    assert not (folder / "journal.log").exists()
    (folder / "study.json").write_text("{}")
    with pytest.raises(UserError, match=r"study\.json: damaged"):
        compare.main([f"{folder}:part=all", f"{folder}:part=none"])
