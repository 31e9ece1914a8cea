"""The evaluator beside a training: every checkpoint once, and an end in every case."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maml import evaluate as evaluation
from maml.config.presets import with_values
from maml.errors import UserError
from maml.run import checkpoint
from maml.run import directory as run_directory
from maml.run.checkpoint import numbered_checkpoint, numbered_checkpoints
from tests.launching import TRAIN, start
from tests.runs import as_flags, glyphs, last, sinusoid, supervised, train

pytestmark = pytest.mark.usefixtures("no_pictures")

CONFIG = glyphs(iterations=7, checkpoint_every=2)
COMMAND = [sys.executable, "-m", "maml.evaluate"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(CONFIG, folder)
    return folder


@pytest.fixture
def directory(trained: Path, tmp_path: Path) -> Path:
    """A finished run's directory, with checkpoints 2, 4, 6 and 7."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]


def iterations(directory: Path) -> list[int]:
    return [row["iteration"] for row in rows(directory)]


def command(directory: Path, *options: str) -> int:
    return evaluation.main([str(directory), "--watch", "--tasks", "4", "--poll", "0.01", *options])


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("trained")  # glyphs are drawn by then
def test_from_before_the_beginning_to_the_end(tmp_path: Path, cache_dir: Path) -> None:
    directory = tmp_path / "not" / "yet"
    watching = start(
        [*COMMAND, str(directory), "--watch", "--poll", "0.05", "--tasks", "4"],
        env={"MAML_CACHE": str(cache_dir)},
    )
    watching.wait_for(f"watching {directory}", 60)
    (directory / "checkpoints").mkdir(parents=True)
    for name in (".iteration-00000003.pt.99.tmp", "iteration-00000003.pt.part", "iteration-3.pt"):
        (directory / "checkpoints" / name).write_bytes(b"half a checkpoint")
    train(CONFIG, directory)
    done = watching.wait(60)
    # It may be the first to need the test split, too.
    said = [line for line in done.stderr.splitlines() if not line.startswith("drawing glyphs")]
    assert said == [f"watching {directory}"]
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"iteration {n}" for n in (2, 4, 6, 7)]
    assert lines[-1] == "training has finished after iteration 7"
    # The numbers are those of an evaluation alone.
    for n in ("2", "7"):
        assert evaluation.main([str(directory), "--tasks", "4", "--iteration", n]) == 0
    found = [
        {k: v for k, v in row.items() if k not in ("time", "seconds")} for row in rows(directory)
    ]
    assert [row["iteration"] for row in found] == [2, 4, 6, 7, 2, 7]
    assert (found[0], found[3]) == (found[4], found[5])


def test_a_training_is_stopped_and_then_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped: the watcher ends with it. Killed: nobody says so, and patience ends."""
    config = sinusoid(
        iterations=10**9, run_dir=str(tmp_path), checkpoint_every=100, keep_checkpoints=10**6
    )

    def wait_for_checkpoint(after: int) -> None:
        launched.wait_for("run directory", 60)
        while max(numbered_checkpoints(tmp_path), default=0) <= after:
            assert launched.process.poll() is None, launched.stderr
            signal.sigtimedwait([], 0.05)

    launched = start([*TRAIN, *as_flags(config)])
    wait_for_checkpoint(0)
    watching = start([*COMMAND, str(tmp_path), "--watch", "--poll", "0.05", "--tasks", "2"])
    watching.wait_for("iteration 100: ", 60)
    launched.process.send_signal(signal.SIGTERM)
    launched.wait(60, expect=143)
    done = watching.wait(60)
    reached = last(tmp_path)["iteration"]
    assert iterations(tmp_path) == list(numbered_checkpoints(tmp_path))
    assert done.stdout.splitlines()[-1] == f"training has stopped after iteration {reached}"

    launched = start([*TRAIN, *as_flags(config)])
    wait_for_checkpoint(reached)
    launched.process.kill()
    launched.wait(10, expect=-signal.SIGKILL)
    assert command(tmp_path, "--tasks", "2", "--patience", "0.3") == 1
    assert iterations(tmp_path) == list(numbered_checkpoints(tmp_path))
    assert "nothing has changed for 0.3 s (--patience); training was lost" in told(capsys)


def test_each_once_for_each_question(directory: Path) -> None:
    """Started again, it does nothing twice, but for a row that was cut short."""
    assert evaluation.main([str(directory), "--tasks", "4"]) == 0
    for question in [(), ("--split", "validation"), ("--non-transductive",)] * 2:
        assert command(directory, *question) == 0
    assert iterations(directory) == [7, 2, 4, 6, *[2, 4, 6, 7] * 2]
    path = directory / "evaluations.jsonl"
    path.write_text(path.read_text()[:-20])
    assert command(directory, "--non-transductive") == 0
    assert json.loads(path.read_text().splitlines()[-1])["iteration"] == 7
    assert len(path.read_text().splitlines()) == 13


def test_nothing_twice_where_examples_run_out(tmp_path: Path) -> None:
    """A classifier's test set is seen once, however many batches are asked for."""
    train(supervised(iterations=2, checkpoint_every=2), tmp_path)
    for _ in range(2):
        assert command(tmp_path, "--tasks", "600") == 0
    (row,) = rows(tmp_path)
    assert row["tasks"] < 600


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--watch", "--poll", "0"], "--poll must be positive and finite, not 0.0"),
        (["--watch", "--patience", "nan"], "--patience must be positive and finite, not nan"),
        (["--patience", "3"], "--patience goes with --watch"),
    ],
)
def test_bad_requests(arguments: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        evaluation.main([str(tmp_path), *arguments])


def test_one_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every process would write the same rows."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        evaluation.main([str(tmp_path), "--watch"])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Let each sleep of the watcher be the next step of a training, and take its time."""

    def begin(*steps: Callable[[], object]) -> list[float]:
        now, left = [0.0], list(steps)

        def sleep(seconds: float) -> None:
            now[0] += seconds
            assert now[0] < 10_000, "it never ends"
            if left:
                left.pop(0)()

        monkeypatch.setattr("maml.run.watch.time.monotonic", lambda: now[0])
        monkeypatch.setattr("maml.run.watch.time.sleep", sleep)
        return now

    return begin


def said(directory: Path, state: str, iteration: int = 7) -> Callable[[], None]:
    return lambda: run_directory.write_status(directory, state, iteration, 0, CONFIG)


def hidden(directory: Path, *iterations: int) -> list[Callable[[], object]]:
    """Take checkpoints away; return what brings each back."""
    paths = [numbered_checkpoint(directory, iteration) for iteration in iterations]
    aside = [path.rename(directory / path.name) for path in paths]
    return [lambda a=a, p=p: a.rename(p) for a, p in zip(aside, paths, strict=True)]


def test_a_configuration_that_comes_late_and_changes(directory: Path, play: Any) -> None:
    """A training that continues with other queries is evaluated with those."""
    config = (directory / "config.yaml").rename(directory / "late.yaml")
    other = with_values(CONFIG, eval_queries=5)
    last_two = hidden(directory, 6, 7)
    play(
        said(directory, "training"),
        lambda: config.rename(directory / "config.yaml"),
        lambda: run_directory.write_config(directory, other),
        *last_two,
        said(directory, "finished"),
    )
    assert command(directory, "--poll", "5") == 0
    found = [(row["iteration"], row["eval_queries"]) for row in rows(directory)]
    assert found == [(2, 2), (4, 2), (6, 5), (7, 5)]


def test_a_checkpoint_that_is_seen_late(
    directory: Path, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh status beside an old listing, as NFS shows them; one that never comes is told."""
    (back,) = hidden(directory, 7)
    play(lambda: None, back)
    assert command(directory, "--poll", "5") == 0
    assert iterations(directory) == [2, 4, 6, 7]
    hidden(directory, 7)
    (directory / "evaluations.jsonl").unlink()
    now = play()
    assert command(directory, "--poll", "5") == 1
    assert 90 < now[0] < 100
    assert told(capsys).endswith("training has finished, but checkpoint 7 is not there")


def test_gone_between_listing_and_reading(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training keeps only the newest few: what it deletes is not damaged."""
    load = checkpoint.load

    def late(path: Path) -> dict[str, Any]:
        numbered_checkpoint(directory, 2).unlink(missing_ok=True)
        return load(path)

    monkeypatch.setattr("maml.run.checkpoint.load", late)
    assert command(directory) == 0
    assert iterations(directory) == [4, 6, 7]
    assert capsys.readouterr().err.splitlines() == [f"watching {directory}"]


def test_a_damaged_one_is_evaluated_once_it_is_whole(
    directory: Path, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = numbered_checkpoint(directory, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    said(directory, "training")()
    play(lambda: None, lambda: path.write_bytes(whole), said(directory, "finished"))
    assert command(directory, "--poll", "5") == 0
    assert iterations(directory) == [2, 6, 7, 4]
    assert capsys.readouterr().err.count("not a readable checkpoint") == 1
    # The last one: no success.
    numbered_checkpoint(directory, 7).write_bytes(b"")
    (directory / "evaluations.jsonl").unlink()
    assert command(directory) == 1
    assert told(capsys).endswith("after iteration 7, but its last checkpoint is damaged")


def test_a_failed_training_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it has saved is evaluated all the same."""
    said(directory, "failed", 8)()
    assert command(directory) == 1
    assert iterations(directory) == [2, 4, 6, 7]
    assert told(capsys) == f"error: {directory}: training has failed after iteration 8"


def test_patience(directory: Path, play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts from the last change of anything that training writes, half a file, too."""
    said(directory, "training")()
    half = directory / "checkpoints" / ".last.pt.1.tmp"
    signs = [lambda: half.write_bytes(b"1"), said(directory, "training", 8)]
    now = play(*[step for sign in signs for step in (*[lambda: None] * 8, sign)])
    assert command(directory, "--poll", "10", "--patience", "100") == 1
    # Nine sleeps a sign.
    assert now[0] == pytest.approx(2 * 90 + 100, abs=11)
    assert "nothing has changed for 100 s (--patience)" in told(capsys)
    assert command(directory / "nowhere", "--patience", "3") == 1
    assert "no training has begun" in told(capsys)
