"""Sweeps: every trial runs once, whichever process is killed, and states are true."""

import csv
import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from maml.errors import UserError
from maml.run import directory
from maml.studies import arms
from maml.studies import sweep as command
from maml.studies.sweep import share, value_of_run
from maml.studies.sweeping import file, sweep
from maml.studies.sweeping.sweep import FAILED, FINISHED, WAITING, Sweep, Trial
from tests.launching import REPO, Launched, start, until
from tests.runs import glyphs
from tests.studies import sweeps

FAKE = ["${interpreter}", str(REPO / "tests" / "studies" / "fake_trainer.py"), "${args}"]


def written(folder: Path, parameters: dict[str, Any], **said: Any) -> Path:
    """Write a grid's file. A parameter is a mapping, a list of values, or one value."""
    described = {}
    for name, value in parameters.items():
        key = "values" if isinstance(value, list) else "value"
        described[name] = value if isinstance(value, dict) else {key: value}
    return sweeps.written(folder, **{"command": FAKE, "parameters": described, **said})


def swept(path: Path, *flags: str) -> int:
    return command.main([str(path), "--trust", "--folder", str(path.parent / "there"), *flags])


def begun(path: Path, *flags: str) -> Launched:
    command = ["-m", "launch.sweep", str(path), "--trust", "--folder", str(path.parent / "there")]
    return start([sys.executable, *command, *flags])


def opened(path: Path) -> Sweep:
    return Sweep(path.parent / "there", file.read(path))


def states(path: Path) -> list[str]:
    return [trial.state for trial in opened(path).trials()]


def starts(trial: Trial) -> list[list[str]]:
    return [line.split() for line in (trial.run_dir / "starts").read_text().splitlines()]


def test_a_sweep_runs_every_point_once_and_then_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early = {"type": "hyperband", "min_iter": 1}
    path = written(tmp_path, {"seed": [0, 1, 2], "good": [0.25, 0.5]}, early_terminate=early)
    assert swept(path, "--workers", "2", "--total", "4") == 0
    assert states(path) == [FINISHED] * 4
    name = opened(path).study.study_name
    # --total is not four more. Then the rest runs, with further numbers, in the same study.
    assert swept(path, "--total", "4") == 0
    assert swept(path, "--workers", "2") == 0 == swept(path)
    trials = opened(path).trials()
    assert [trial.record.number for trial in trials] == list(range(6))
    assert {(t.record.params["seed"], t.record.params["good"], t.record.value) for t in trials} == {
        (seed, good, good) for seed in range(3) for good in (0.25, 0.5)
    }
    assert [len(starts(trial)) for trial in trials] == [1] * 6
    assert {starts(trial)[0][2] for trial in trials} == {name} == {opened(path).study.study_name}
    # Two workers share the cores.
    cores = len(os.sched_getaffinity(0))
    assert {int(starts(trial)[0][1]) for trial in trials} == {max(1, cores // 2)}
    said = capsys.readouterr().out
    first = r"trial 0 \(good=0\.25 seed=0\): finished, validation/accuracy 0\.25; .* to come"
    assert re.search(first, said), said
    assert said.splitlines()[-1].endswith("6 finished, 0 to come")
    assert "early_terminate: left out; each trial runs to its end" in said
    # A file may have a cap, which holds if the command has no --total.
    endless = {"good": {"min": 0.0, "max": 1.0}}
    path = written(tmp_path / "there", endless, method="random", run_cap=2)
    assert swept(path) == 0 == swept(path)
    assert states(path) == [FINISHED] * 2


def test_what_a_trial_s_end_says(tmp_path: Path) -> None:
    """A trial that was told to stop waits, because a scheduler stops all processes of a job."""
    said = []
    for number, (parameters, code, expected) in enumerate((
        ({"seed": [0, 1], "ends": 143}, 143, [WAITING]),
        ({"ends": -9}, 1, [FAILED]),
        ({"ends": -35}, 1, [FAILED]),
        ({"good": ["inf", 0.5]}, 1, [FAILED, FINISHED]),
    )):  # fmt: skip
        path = written(tmp_path / str(number), parameters)
        assert swept(path) == code and states(path) == expected
        said.append(opened(path).trials()[0].record.user_attrs["reason"])
    killed, infinite = "killed by SIGKILL (out of memory?)", "its validation/accuracy is inf"
    assert said == ["", killed, "killed by signal 35", f"{infinite} at the end"]
    lost = written(tmp_path / "lost", {"seed": [0]}, metric={"name": "validation/loss"})
    assert swept(lost) == 1
    assert "no validation/loss in" in opened(lost).trials()[0].record.user_attrs["reason"]
    # A metric has its loggers' name. Another program's config.yaml does not matter.
    row = {"iteration": 1, "split": "validation", "after": {"0": 0.25, "1": 0.5}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    (tmp_path / "config.yaml").write_text("rate: 0.1")
    assert value_of_run(tmp_path, "validation/after/1") == 0.5


def test_workers_share_cores_and_gpus() -> None:
    for workers, parts in ((1, ["4567"]), (2, ["46", "57"]), (3, ["47", "5", "6"])):
        assert ["".join(share([*"4567"], i, workers)) for i in range(workers)] == parts
    assert [share([7], i, 2) for i in range(2)] == [[7], [7]] and share([], 1, 2) == []


def test_a_report_ranks_settings_and_a_failed_trial_goes_on_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test tasks rank settings only if the file asks for it, and then the report says so."""
    parameters = {"seed": [0, 1, 2], "good": [0.25, 0.5], "fails": 1}
    path = written(tmp_path, parameters, metric={"name": "test/accuracy", "goal": "maximize"})
    assert swept(path, "--report") == 1 == swept(path)  # it is not tried again by itself
    assert states(path) == [FINISHED, FAILED, FINISHED] * 2
    said = capsys.readouterr().out
    assert "trial 1 (good=0.25 seed=1): failed: exit code 2: as was asked (log " in said
    report = (tmp_path / "there" / "report.md").read_text()
    assert report.index("| good=0.5  | 43.75 %") < report.index("| good=0.25 ")
    assert "Ranked by test/accuracy (maximize)" in report and "chosen on them" in report
    assert report.count(": exit code 2: as was asked (`") == 2
    assert (tmp_path / "there" / "effects.png").exists()
    # Without workers, the report shows what there is.
    assert swept(path, "--workers", "0", "--report") == 0
    assert (tmp_path / "there" / "report.md").read_text() == report
    # It names the inner steps of each setting's tests, if a program tells its configuration.
    directory.write_config(opened(path).trials()[3].run_dir, glyphs(eval_inner_steps=5))
    assert swept(path, "--workers", "0", "--report") == 0
    report = (tmp_path / "there" / "report.md").read_text()
    assert re.search(r"good=0\.5 .* 5 +\|\n.*good=0\.25 .* – +\|", report), report
    monkeypatch.setenv("FAKE_MENDED", "1")
    assert swept(path, "--retry", "--report") == 0
    assert states(path) == [FINISHED] * 6
    assert [len(starts(trial)) for trial in opened(path).trials()] == [1, 2, 1] * 2
    assert "What failed" not in (tmp_path / "there" / "report.md").read_text()


def test_a_grid_of_two_parameters_is_a_table_and_a_heat_map(tmp_path: Path) -> None:
    """Each as files for papers; a setting whose trials all failed is left out."""
    path = written(tmp_path, {"good": [0.25, 0.5, "inf"], "rounds": [1, 2], "seed": [0, 1]})
    assert swept(path, "--workers", "2", "--report") == 1
    there = tmp_path / "there"
    assert np.asarray(Image.open(there / "grid.png").convert("L")).std() > 5
    assert "](grid.png)" in (there / "report.md").read_text()
    with open(there / "settings.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    found = {(row["good"], row["rounds"], row["validation/accuracy"]) for row in rows}
    assert found == {(good, rounds, good) for good in ("0.25", "0.5") for rounds in "12"}
    assert {(row["trials"], row["spread"]) for row in rows} == {("2", "0.0")}
    table = (there / "settings.tex").read_text().splitlines()
    assert table[1:3] == [r"\begin{tabular}{lrrrr}", r"\toprule"]
    assert r"good=0.5 rounds=1 & 50.00 \% & 0.00 \% & 2 & -- \\" in table


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_continues_its_trials(number: signal.Signals, tmp_path: Path) -> None:
    """At Ctrl-C, trials save and wait. They go on from where they were, as after a power cut."""
    path = written(tmp_path, {"seed": [0, 1], "rounds": 40, "pause": 0.05})
    launched = begun(path, "--workers", "2")
    try:
        until(lambda: len(list(tmp_path.glob("there/trials/*/metrics.jsonl"))) == 2, timeout=60)
        if number == signal.SIGINT:
            launched.process.send_signal(number)
            launched.wait(60, expect=130)
    finally:
        launched.kill()
    assert states(path) == [WAITING] * 2
    assert swept(path, "--workers", "2") == 0
    for trial in opened(path).trials():
        (first, second), rows = starts(trial), trial.run_dir / "metrics.jsonl"
        assert first[0] == "0" and int(second[0]) > 0
        assert rows.read_text().count("validation") == 40


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_signal_no_further_trial_starts(workers: int, tmp_path: Path) -> None:
    """The signal comes while trials test, and whichever thread of the sweep gets it."""
    path = written(tmp_path, {"seed": [0, 1, 2, 3], "rounds": 1, "test": 2.0})
    launched = begun(path, "--workers", str(workers))
    pid = launched.process.pid
    try:
        until(lambda: len(list(tmp_path.glob("there/trials/*/metrics.jsonl"))) == workers)
        thread = max(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
        assert ctypes.CDLL(None).tgkill(pid, thread, signal.SIGTERM) == 0
        launched.wait(60, expect=143)
    finally:
        launched.kill()
    assert states(path) == [FINISHED] * workers


def test_processes_share_a_sweep_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    """One of three processes is killed. Its training ends, and another process goes on with it."""
    path = written(tmp_path, {"seed": list(range(6)), "rounds": 10, "pause": 0.2})
    all_three = [begun(path) for _ in range(3)]
    try:
        until(lambda: len(list(tmp_path.glob("there/trials/*/metrics.jsonl"))) >= 3)
        all_three[2].process.kill()
        until(lambda: len(all_three[2].processes()) == 0)
        for one in all_three[:2]:
            one.wait(60)
    finally:
        for one in all_three:
            one.kill()
    trials = opened(path).trials()
    assert [trial.state for trial in trials] == [FINISHED] * 6
    (lost,) = [trial for trial in trials if len(starts(trial)) > 1]
    (_, (reached, *_)) = starts(lost)
    assert 0 < int(reached) < 10  # it was stopped, and went on from where it was
    for trial in trials:
        assert (trial.run_dir / "metrics.jsonl").read_text().count("validation") == 10


def test_a_trial_that_was_finished_as_its_worker_died_is_not_run_again(tmp_path: Path) -> None:
    path = written(tmp_path, {"seed": [0]})
    sweep = opened(path)
    trial = sweep.take(None)
    assert trial is not None and sweep.take(None) is None
    with trial.hold:
        flags = [f"--run_dir={trial.run_dir}", "--seed=0"]
        environment = os.environ | {"WANDB_RUN_GROUP": sweep.study.study_name}
        subprocess.run([sys.executable, FAKE[1], *flags], check=True, env=environment)
        assert states(path) == ["running"]
    assert states(path) == [WAITING]
    assert swept(path) == 0
    assert states(path) == [FINISHED] and len(starts(opened(path).trials()[0])) == 1
    # A worker that was thought dead has lost its trial.
    sweep.end(trial, None, reason="late")
    assert states(path) == [FINISHED]


def test_without_locks_a_silent_process_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_locks = Mock(side_effect=OSError(errno.ENOSYS, "no locks here"))
    monkeypatch.setattr("filelock.FileLock.acquire", no_locks)
    monkeypatch.setattr("datasets.locks.BEAT_S", 0.1)
    path = written(tmp_path, {"seed": [0]})
    trial = opened(path).take(None)
    assert trial is not None
    monkeypatch.setattr("maml.studies.sweeping.sweep.GRACE", 0.5)
    time.sleep(1.0)
    assert states(path) == ["running"] and opened(path).take(None) is None
    trial.hold.close()
    monkeypatch.setattr("maml.studies.sweeping.sweep.GRACE", 0.0)
    assert states(path) == [WAITING]
    assert swept(path) == 0
    assert states(path) == [FINISHED]


def test_a_torn_last_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = written(tmp_path, {"seed": [0, 1]})
    assert swept(path, "--total", "1") == 0
    journal = tmp_path / "there" / "journal.log"
    whole = journal.read_bytes()
    torn = whole + b'{"op_code":4,"work\0\0'
    journal.write_bytes(torn)
    # A comparison only reads the folder.
    with pytest.raises(UserError, match="no run directory"):
        arms.read(str(journal.parent), None)
    assert journal.read_bytes() == torn
    assert sweep.points_in(journal.parent) == {journal.parent / "trials" / "0000": {"seed": 0}}
    assert swept(path) == 0
    assert states(path) == [FINISHED] * 2
    assert journal.read_bytes().startswith(whole)
    for line in journal.read_text().splitlines():
        json.loads(line)
    # In the middle it is refused.
    journal.write_bytes(whole[:50] + b"nonsense\n" + whole[50:])
    with pytest.raises(UserError, match=f"{journal}: damaged"):
        swept(path)


def test_what_is_refused(tmp_path: Path) -> None:
    """Bad flags, and a file that is another sweep's."""
    endless = written(tmp_path, {"good": {"min": 0.0, "max": 1.0}}, method="random")
    with pytest.raises(UserError, match=r"--total: .* infinitely many"):
        swept(endless)
    path = written(tmp_path, {"seed": [0, 1], "good": 0.5})
    with pytest.raises(UserError, match=r"--workers 0: nothing was"):
        swept(path, "--workers", "0")
    assert not (tmp_path / "there").exists()
    assert swept(path) == 0
    for parameters, said, says in (
        ({"seed": [1, 2], "good": 0.5}, {}, "seed was 0 in trial 0"),
        ({"seed": [0, 1]}, {}, "good is not in both"),
        ({"seed": [0, 1], "good": 0.5}, {"command": ["${args}"]}, "command was "),
    ):
        with pytest.raises(UserError, match=f"{path}: not what was run in .*: .*{says}.*--folder"):
            swept(written(tmp_path, parameters, **said))
    # One more value is more of the same.
    assert swept(written(tmp_path, {"seed": [0, 1, 5], "good": 0.5}, description="longer")) == 0
    assert [t.record.params["seed"] for t in opened(path).trials()] == [0, 1, 5]
