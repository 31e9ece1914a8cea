"""The evaluator next to a training: it takes each checkpoint once, and it always ends."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maml import evaluate as evaluation
from maml.config.presets import with_values
from maml.run import checkpoint
from maml.run import directory as run_directory
from maml.run.checkpoint import numbered_checkpoint, numbered_checkpoints
from tests.launching import TRAIN, start
from tests.runs import as_flags, glyphs, last, sinusoid, train
from tests.strategies.faults import wait_for_iteration

pytestmark = pytest.mark.usefixtures("no_pictures")

CONFIG = glyphs(iterations=7, checkpoint_every=2)
OPTIONS = ["--watch", "--tasks", "4", "--poll", "0.05"]
COMMAND = [sys.executable, "-m", "maml.evaluate", *OPTIONS]


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
    return evaluation.main([str(directory), *OPTIONS, *options])


@pytest.mark.usefixtures("trained")  # glyphs are drawn by then
def test_from_before_the_beginning_to_the_end(tmp_path: Path, cache_dir: Path) -> None:
    directory = tmp_path / "not" / "yet"
    watching = start([*COMMAND, str(directory)], env={"MAML_CACHE": str(cache_dir)})
    watching.wait_for(f"watching {directory}", 60)
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / "iteration-00000003.pt.part").write_bytes(b"half a checkpoint")
    train(CONFIG, directory)
    done = watching.wait(60)
    said = [line for line in done.stderr.splitlines() if not line.startswith("drawing glyphs")]
    assert said == [f"watching {directory}"]
    assert done.stdout.splitlines()[-1] == "training has finished after iteration 7"
    for n in ("2", "7"):
        assert evaluation.main([str(directory), "--tasks", "4", "--iteration", n]) == 0
    assert iterations(directory) == [2, 4, 6, 7, 2, 7]
    found = [[v for k, v in row.items() if k != "time"] for row in rows(directory)]
    assert (found[0], found[3]) == (found[4], found[5])


def test_a_training_is_stopped_and_then_killed(tmp_path: Path, capsys: Any) -> None:
    """The watcher ends with a stopped training. After a killed one, it ends by --patience."""
    values = {"iterations": 10**9, "checkpoint_every": 100, "keep_checkpoints": 10**6}
    flags = as_flags(sinusoid(run_dir=str(tmp_path), **values))
    launched = start([*TRAIN, *flags])
    watching = start([*COMMAND, str(tmp_path)])
    watching.wait_for("iteration 100: ", 60)
    launched.process.send_signal(signal.SIGTERM)
    launched.wait(60, expect=143)
    done = watching.wait(60)
    reached = last(tmp_path)["iteration"]
    assert iterations(tmp_path) == list(numbered_checkpoints(tmp_path))
    assert done.stdout.splitlines()[-1] == f"training has stopped after iteration {reached}"

    launched = start([*TRAIN, *flags])
    wait_for_iteration(launched, tmp_path, reached + 200, limit=60)
    launched.process.kill()
    launched.wait(10, expect=-signal.SIGKILL)
    assert command(tmp_path, "--patience", "0.3") == 1
    assert iterations(tmp_path) == list(numbered_checkpoints(tmp_path))
    assert (
        "nothing has changed for 0.3 s (--patience); training was lost" in capsys.readouterr().err
    )


def test_each_once_for_each_question(directory: Path) -> None:
    """A second start repeats no evaluation, except one whose row was cut short."""
    assert evaluation.main([str(directory), "--tasks", "4"]) == 0
    for question in [(), ("--split", "validation"), ("--non-transductive",)] * 2:
        assert command(directory, *question) == 0
    assert iterations(directory) == [7, 2, 4, 6, *[2, 4, 6, 7] * 2]
    path = directory / "evaluations.jsonl"
    path.write_text(path.read_text()[:-20])
    assert command(directory, "--non-transductive") == 0
    assert len(path.read_text().splitlines()) == 13


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Fake the clock: each sleep of the watcher also takes the next step. ``int`` does nothing."""

    def begin(*steps: Callable[[], object]) -> list[float]:
        now, left = [0.0], iter(steps)

        def sleep(seconds: float) -> None:
            now[0] += seconds
            assert now[0] < 10_000, "it never ends"
            next(left, int)()

        monkeypatch.setattr("maml.evaluate.time.monotonic", lambda: now[0])
        monkeypatch.setattr("maml.evaluate.time.sleep", sleep)
        return now

    return begin


def said(directory: Path, state: str, iteration: int = 7) -> Callable[[], None]:
    return lambda: run_directory.write_status(directory, state, iteration)


def test_a_damaged_one_is_left_out_unless_it_is_written_again(
    directory: Path, play: Any, capsys: Any
) -> None:
    path = numbered_checkpoint(directory, 4)
    whole = path.read_bytes()
    path.write_bytes(b"")
    said(directory, "training")()
    play(int, lambda: path.write_bytes(whole), said(directory, "finished"))
    assert command(directory) == 0 and iterations(directory) == [2, 6, 7, 4]
    assert capsys.readouterr().err.count("not a readable checkpoint") == 1
    numbered_checkpoint(directory, 7).write_bytes(b"")
    now = play()
    assert command(directory, "--poll", "5", "--split", "validation") == 1
    assert 90 < now[0] < 100
    assert iterations(directory) == [2, 6, 7, 4, 2, 4, 6]
    err = capsys.readouterr().err
    assert "training has finished; checkpoint 7 is missing or damaged\n" in err


def test_what_comes_late_or_changes(directory: Path, play: Any) -> None:
    """A resumed training has other queries; NFS shows files late."""
    config = (directory / "config.yaml").rename(directory / "late.yaml")
    other, path = with_values(CONFIG, eval_queries=5), numbered_checkpoint(directory, 7)
    aside = path.rename(directory / "aside.pt")
    play(
        lambda: config.rename(directory / "config.yaml"),
        lambda: run_directory.write_config(directory, other),
        lambda: aside.rename(path),
    )
    assert command(directory, "--poll", "5") == 0
    found = [(row["iteration"], row["eval_queries"]) for row in rows(directory)]
    assert found == [(2, 2), (4, 2), (6, 2), (7, 5)]


def test_gone_between_listing_and_reading(directory: Path, monkeypatch: Any, capsys: Any) -> None:
    """Training keeps only the newest few: what it deletes is not damaged."""
    load = checkpoint.load

    def late(path: Path) -> dict[str, Any]:
        numbered_checkpoint(directory, 2).unlink(missing_ok=True)
        return load(path)

    monkeypatch.setattr("maml.run.checkpoint.load", late)
    assert command(directory) == 0
    assert iterations(directory) == [4, 6, 7]
    assert capsys.readouterr().err.splitlines() == [f"watching {directory}"]


def test_patience_and_failure(directory: Path, play: Any, capsys: Any) -> None:
    """Patience counts from the last change of anything that training writes, half a file, too."""
    said(directory, "training")()
    half = directory / "checkpoints" / ".last.pt.1.tmp"
    signs = [lambda: half.write_bytes(b"1"), said(directory, "training", 8)]
    now = play(*[step for sign in signs for step in (*[int] * 8, sign)])
    assert command(directory, "--poll", "10", "--patience", "100") == 1
    assert now[0] == pytest.approx(2 * 90 + 100, abs=11)  # nine sleeps a sign
    assert "nothing has changed for 100 s (--patience)" in capsys.readouterr().err
    assert command(directory / "nowhere", "--patience", "3") == 1
    assert "no training has begun" in capsys.readouterr().err
    (directory / "status.json").write_text('{"state": ["training"], "iteration": {}}')
    assert command(directory, "--patience", "3") == 1
    assert "or status.json is damaged\n" in capsys.readouterr().err
    said(directory, "failed", 8)()
    assert command(directory, "--split", "validation") == 1
    assert iterations(directory) == [2, 4, 6, 7] * 2
    assert f"error: {directory}: training has failed after iteration 8\n" in capsys.readouterr().err
