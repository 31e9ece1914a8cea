"""The evaluator beside a training: every checkpoint once, and an end in every case."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maml import evaluate as evaluation
from maml.config import Config
from maml.config.presets import with_values
from maml.errors import UserError
from maml.processes.world import World
from maml.run import checkpoint, files
from maml.run import directory as run_directory
from maml.run.checkpoint import numbered_checkpoint, numbered_checkpoints
from maml.run.watch import SETTLE, watch
from maml.scores import evaluate
from maml.strategies.local import Local
from maml.worker import Worker
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


def exactly(directory: Path, config: Config, iteration: int, **options: Any) -> dict[str, Any]:
    """What evaluating a kept checkpoint gives, without any watching."""
    world = World(0, 1, 0, 1, launched=False)
    strategy = Local(config, world, Worker(config, torch.device("cpu")))
    saved = checkpoint.load(numbered_checkpoint(directory, iteration))
    return evaluate(strategy, saved["model"], **({"split": "test", "tasks": 4} | options))


# ---- as commands, beside a training ------------------------------------------------------------


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
    found = rows(directory)
    assert [row["iteration"] for row in found] == [2, 4, 6, 7]
    for row in found:
        exact = exactly(directory, CONFIG, row["iteration"])
        assert {name: row[name] for name in exact} == exact
        assert row["accuracy_ci95"] >= 0
        assert row["transductive"] is True
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"iteration {n}" for n in (2, 4, 6, 7)]
    assert "± " in lines[0]
    assert lines[-1] == "training finished after iteration 7"
    # It may be the first to need the test split, too.
    said = [line for line in done.stderr.splitlines() if not line.startswith("drawing glyphs")]
    assert said == [f"watching {directory}"]


def test_a_training_is_stopped_and_then_killed(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped: the watcher ends with it. Killed: nobody says so, and patience ends."""
    config = sinusoid(
        iterations=10**9, run_dir=str(tmp_path), checkpoint_every=100, keep_checkpoints=10**6
    )

    def wait_for_checkpoint(after: int) -> None:
        """Wait, as training's own words say nothing of checkpoints."""
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
    assert iterations(tmp_path)[-1] == reached
    *_, said = done.stdout.splitlines()
    assert said.startswith(f"training was stopped after iteration {reached}; ")

    launched = start([*TRAIN, *as_flags(config)])
    wait_for_checkpoint(reached)
    launched.process.kill()
    launched.wait(10, expect=-signal.SIGKILL)
    assert command(tmp_path, "--tasks", "2", "--patience", "0.3") == 1
    assert iterations(tmp_path) == list(numbered_checkpoints(tmp_path))
    (error,) = re.findall("error: .*", capsys.readouterr().err)
    assert f"{tmp_path}: training was lost after iteration " in error
    assert f"process {launched.process.pid} of {platform.node()} is gone" in error
    assert "nothing has changed for 0.3 s (--patience)" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(number: signal.Signals, tmp_path: Path) -> None:
    watching = start([*COMMAND, str(tmp_path), "--watch", "--poll", "500"])
    watching.wait_for("watching", 60)
    watching.process.send_signal(number)
    done = watching.wait(20, expect=128 + number)
    assert done.stderr.splitlines()[1:] == [
        f"stopped by {number.name}; the same command goes on from here"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation(
    number: signal.Signals, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, without its row; the next one does it again."""
    real, calls = evaluation.evaluate, []

    def signalled(*args: Any, **options: Any) -> dict[str, Any]:
        result = real(*args, **options)
        calls.append(result)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
            raise AssertionError("the signal did not end it")
        return result

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(evaluation, "evaluate", signalled)
    assert command(directory) == 128 + number
    assert iterations(directory) == [2]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert command(directory) == 0
    assert iterations(directory) == [2, 4, 6, 7]


# ---- what is evaluated -------------------------------------------------------------------------


def test_nothing_twice(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluation.main([str(directory), "--tasks", "4"]) == 0
    for _ in range(2):
        assert command(directory) == 0
        assert iterations(directory) == [7, 2, 4, 6]
    assert capsys.readouterr().out.count("iteration 7: test accuracy") == 1


def test_nothing_twice_where_examples_run_out(tmp_path: Path) -> None:
    """A classifier's test set is seen once, however many batches are asked for."""
    train(supervised(iterations=2, checkpoint_every=2), tmp_path)
    for _ in range(2):
        assert command(tmp_path, "--tasks", "600") == 0
    (row,) = rows(tmp_path)
    assert row["tasks"] < 600


def test_another_question_is_another_row(directory: Path) -> None:
    questions = [
        (), ("--split", "validation"), ("--tasks", "3"), ("--non-transductive",),
    ]  # fmt: skip
    for question in questions * 2:
        assert command(directory, *question) == 0
    assert iterations(directory) == [2, 4, 6, 7] * 4
    asked = [(row["split"], row["tasks"], row["transductive"]) for row in rows(directory)[::4]]
    assert asked == [
        ("test", 4, True), ("validation", 4, True), ("test", 3, True), ("test", 4, False),
    ]  # fmt: skip
    for row in rows(directory):
        exact = exactly(directory, CONFIG, row["iteration"], split=row["split"], tasks=row["tasks"])
        assert {name: row[name] for name in exact} == exact


def test_data_and_device_may_be_elsewhere(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def worker(config: Config, device: torch.device, **rest: Any) -> Worker:
        seen.append(config)
        return Worker(config, device, **rest)

    monkeypatch.setattr(evaluation, "Worker", worker)
    assert command(directory, "--data-root", "elsewhere", "--device", "cpu") == 0
    # One worker for four checkpoints.
    assert [(config.data_root, config.device) for config in seen] == [("elsewhere", "cpu")]
    with pytest.raises(UserError, match="--device nonsense"):
        command(directory, "--device", "nonsense")


def test_a_row_cut_short_is_written_again(directory: Path) -> None:
    assert command(directory) == 0
    path = directory / "evaluations.jsonl"
    path.write_text(path.read_text()[:-20])
    assert command(directory) == 0
    *whole, cut, again = path.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in [*whole, again]] == [2, 4, 6, 7]
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut)


@pytest.mark.parametrize("damage", ["[1]\n", '{"a": 1}\n', "3\n", "\xff\n", "garbage\n"])
def test_damaged_rows_are_one_line_and_stay(damage: str, directory: Path) -> None:
    assert command(directory) == 0
    path = directory / "evaluations.jsonl"
    *most, last_line = path.read_bytes().splitlines(keepends=True)
    content = b"".join(most) + damage.encode("latin-1") + last_line
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        command(directory)
    assert str(caught.value).startswith(f"{path}: line 4 is not a row")
    assert len(str(caught.value).splitlines()) == 1
    assert path.read_bytes() == content


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "folder"])
def test_a_damaged_checkpoint_is_left_out(
    damage: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = numbered_checkpoint(directory, 4)
    whole = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        content = {"truncated": whole[:-100], "garbage": b"garbage", "empty": b""}[damage]
        path.write_bytes(content)
    assert command(directory) == 0
    assert iterations(directory) == [2, 6, 7]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "watching" not in line]
    assert line.startswith(f"{path}: not a readable checkpoint: ")


def test_a_damaged_last_checkpoint_is_no_success(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = numbered_checkpoint(directory, 7)
    path.write_bytes(path.read_bytes()[:-100])
    assert command(directory) == 1
    assert iterations(directory) == [2, 4, 6]
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {path}: training has finished, but ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--watch", "--poll", "0"], "--poll must be positive and finite, not 0.0"),
        (["--watch", "--patience", "-1"], "--patience must be positive and finite, not -1.0"),
        (["--watch", "--patience", "nan"], "--patience must be positive and finite, not nan"),
        (["--patience", "3"], "--patience goes with --watch"),
        (["--poll", "3"], "--poll goes with --watch"),
        (["--watch", "--tasks", "0"], "--tasks must be at least 1"),
        (["--dat", "glyphs"], "unknown flag --dat: did you mean --data"),
        (["--task", "6"], "unknown flag --task: did you mean --tasks"),
        (["--tasks", "1.5"], "--tasks: '1.5' is not a whole number"),
        (["--split", "tests"], "--split: invalid choice: 'tests'"),
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


def test_a_configuration_that_cannot_be_is_told_at_once(directory: Path) -> None:
    (directory / "config.yaml").write_text("config: {ways: 5, no_such_field: 1}\n")
    with pytest.raises(UserError, match=r"config\.yaml: not a configuration of this version"):
        command(directory)


def test_evaluations_that_cannot_be_written(directory: Path) -> None:
    (directory / "evaluations.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"evaluations\.jsonl: .*No space left"):
        command(directory)


# ---- a training acted out, step by step, while the watcher sleeps ------------------------------


class Script:
    """Stands for ``time`` in the watcher: each sleep plays the training's next step."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps, self.now, self.slept = list(steps), 1000.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += max(seconds, 1e-3)
        self.slept += 1
        assert self.slept < 1000, "it never ends"
        if self.steps:
            self.steps.pop(0)()


class Recorder:
    """An evaluator that writes down what it is given."""

    def __init__(self, *already: int, ready: bool = True) -> None:
        self.seen: list[int] = []
        self.already, self.ready = set(already), ready
        self.meanwhile: dict[int, Callable[[], object]] = {}

    def prepare(self) -> bool:
        return self.ready

    def evaluated(self) -> set[int]:
        return self.already

    def evaluate(self, saved: dict[str, Any]) -> None:
        self.seen.append(saved["iteration"])
        self.meanwhile.pop(saved["iteration"], lambda: None)()


class Training:
    """The files that a training would write in ``directory``."""

    def __init__(self, directory: Path, keep: int = 3) -> None:
        self.directory, self.keep, self.start = directory, keep, 0
        self.config = sinusoid(checkpoint_every=2, keep_checkpoints=keep)
        directory.mkdir(exist_ok=True)

    def saves(self, *iterations: int) -> Callable[[], None]:
        def save() -> None:
            for iteration in iterations:
                checkpoint.save_in(self.directory, content(iteration), self.keep)

        return save

    def goes_back_to(self, iteration: int) -> Callable[[], None]:
        def back() -> None:
            checkpoint.continue_from(self.directory, content(iteration), is_last=False)
            self.start = iteration
            self.says("training", iteration)()

        return back

    def says(self, state: str, iteration: int) -> Callable[[], None]:
        return lambda: run_directory.write_status(
            self.directory, state, iteration, self.start, self.config
        )

    def logs(self) -> None:
        files.append_line(self.directory / "metrics.jsonl", "{}")


def content(iteration: int) -> dict[str, Any]:
    return {
        "model": {}, "optimizer": {}, "iteration": iteration, "seconds": 0.0, "config": {},
    }  # fmt: skip


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Script]]:
    def run(
        recorder: Recorder, *steps: Callable[[], object], poll: float = 5, patience: float = 100
    ) -> tuple[int, Script]:
        script = Script(*steps)
        monkeypatch.setattr("maml.run.watch.time", script)
        return watch(tmp_path / "run", recorder, poll=poll, patience=patience), script

    return run


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def nothing() -> None:
    """A step in which nothing happens."""


Play = Callable[..., tuple[int, Script]]


def test_in_order_and_to_the_last(play: Play, training: Training) -> None:
    recorder = Recorder()
    code, _ = play(
        recorder,
        training.says("training", 0),
        training.saves(2, 4),
        nothing,
        training.saves(6),
        # The last checkpoint, the result and the status come at once.
        lambda: (training.saves(8, 9)(), training.says("finished", 9)()),
    )
    assert (code, recorder.seen) == (0, [2, 4, 6, 8, 9])


def test_while_it_evaluates_training_goes_on(play: Play, training: Training) -> None:
    recorder = Recorder()
    recorder.meanwhile = {2: training.saves(4, 6), 6: training.saves(8)}
    recorder.meanwhile[8] = training.says("finished", 8)
    code, script = play(recorder, training.saves(2))
    assert (code, recorder.seen) == (0, [2, 4, 6, 8])
    assert script.slept == 1


def test_what_was_deleted_is_said_once(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    training.saves(2)()
    training.says("training", 0)()
    recorder = Recorder()
    recorder.meanwhile = {
        2: training.saves(4, 6, 8, 10, 12),  # keeps 8, 10, 12
        8: training.saves(14, 16, 18, 20, 22, 24, 26, 28, 30),  # keeps 26, 28, 30
        30: training.says("stopped", 30),
    }
    code, _ = play(recorder)
    assert (code, recorder.seen) == (0, [2, 8, 26, 28, 30])
    _, *lines = capsys.readouterr().err.splitlines()
    # 10 and 12 were seen; 4, 6 and 14 … 24 must have been there, as the status says.
    assert [line.split(": ")[0] for line in lines] == [
        "iterations 4, 6",
        "iterations 10, 12, … 24 (8 checkpoints)",
    ]
    assert all("--keep-checkpoints 3" in line for line in lines)


def test_only_what_is_known_to_have_been_is_missed(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an earlier training, with a rhythm of its own perhaps, nothing is known."""
    training.start = 11
    training.saves(11, 12, 14, 16, 18)()
    training.says("finished", 18)()
    recorder = Recorder(12)
    code, _ = play(recorder)
    assert (code, recorder.seen) == (0, [14, 16, 18])
    assert capsys.readouterr().err.splitlines()[1:] == []


def test_gone_between_listing_and_reading(
    play: Play,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training.saves(2)()
    training.says("training", 0)()
    real, steps = checkpoint.load, [training.saves(4, 6, 8)]

    def load(path: Path) -> dict[str, Any]:
        if steps:
            steps.pop()()
        return real(path)

    monkeypatch.setattr("maml.run.checkpoint.load", load)
    recorder = Recorder()
    recorder.meanwhile[8] = training.says("finished", 8)
    code, _ = play(recorder)
    assert (code, recorder.seen) == (0, [4, 6, 8])
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith("iteration 2: deleted")


def test_a_training_that_goes_back(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it takes back is not missed, and what it makes again is not evaluated again."""
    training.saves(2, 4)()
    recorder = Recorder(ready=False)
    code, _ = play(
        recorder,
        training.saves(6, 8),
        training.goes_back_to(4),
        lambda: setattr(recorder, "ready", True),
        nothing,
        training.saves(6),
        nothing,
        training.goes_back_to(4),
        training.saves(6, 8),
        training.says("finished", 8),
    )
    assert (code, recorder.seen) == (0, [4, 6, 8])
    said = capsys.readouterr().err
    assert said.count("deleted") == 0, said


def test_a_damaged_one_is_evaluated_once_it_is_whole(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = numbered_checkpoint(training.directory, 2)
    damaged.parent.mkdir()
    damaged.write_bytes(b"damaged")
    recorder = Recorder()
    code, _ = play(
        recorder, nothing, nothing, training.saves(2), nothing, training.says("finished", 2)
    )
    assert (code, recorder.seen) == (0, [2])
    assert capsys.readouterr().err.count("not a readable checkpoint") == 1


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_folder_seen_as_it_was(
    state: str, play: Play, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh status.json beside an old listing, as NFS may show them: it waits for the rest."""
    training.saves(2, 4)()
    training.says(state, 4)()
    real, shown = checkpoint.numbered_checkpoints, [2]
    monkeypatch.setattr(
        "maml.run.checkpoint.numbered_checkpoints",
        lambda path: {n: file for n, file in real(path).items() if n in shown},
    )
    recorder = Recorder()
    code, script = play(recorder, nothing, nothing, lambda: shown.append(4))
    assert (code, recorder.seen) == (0, [2, 4])
    assert script.slept == 3


def test_a_last_checkpoint_that_never_comes(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    training.saves(2)()
    training.says("finished", 4)()
    code, script = play(Recorder(), patience=3600)
    assert code == 1
    assert SETTLE < script.now - 1000 < SETTLE + 11
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {numbered_checkpoint(training.directory, 4)}: ")


def test_a_failed_training_is_told(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has saved is evaluated all the same."""
    recorder = Recorder()
    code, _ = play(recorder, training.saves(2), training.says("failed", 3))
    assert (code, recorder.seen) == (1, [2])
    *_, error = capsys.readouterr().err.splitlines()
    assert error == f"error: {training.directory}: training failed after iteration 3"


def test_a_training_that_was_killed_is_told(
    play: Play, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long before patience ends, but not before a launcher may have started it again."""

    def killed() -> None:
        path = training.directory / "status.json"
        status = json.loads(path.read_text())
        status["process"]["since"] += "0"  # another process has its number by now
        path.write_text(json.dumps(status))

    begins = training.says("training", 2)
    recorder = Recorder()
    again = [killed, nothing, begins, training.saves(4), training.says("training", 4), killed]
    code, script = play(recorder, training.saves(2), begins, *again, patience=3600)
    assert (code, recorder.seen) == (1, [2, 4])
    assert SETTLE < script.now - 1000 < SETTLE + 100
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {training.directory}: training was lost after iteration 4: ")


def test_patience(play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It counts from the last change of anything that training writes, and of nothing else."""
    assert play(Recorder())[1].now == pytest.approx(1100, abs=1)
    assert "no such run directory for 100 s (--patience)" in capsys.readouterr().err
    training = Training(tmp_path / "run")
    half = training.directory / "checkpoints" / ".last.pt.1.tmp"
    training.saves(2)()
    recorder = Recorder()
    signs = [
        training.says("training", 0), training.logs, training.saves(4),
        lambda: half.write_bytes(b"1"), lambda: half.write_bytes(b"12"),
        # A clock that is years behind, or ahead.
        lambda: os.utime(half, (0, 0)), lambda: os.utime(half, (2**32, 2**32)),
    ]  # fmt: skip
    steps = [step for sign in signs for step in (*[nothing] * 8, sign)]

    def own_row() -> None:
        files.append_line(training.directory / "evaluations.jsonl", "{}")

    code, script = play(recorder, *steps, *[own_row] * 100, poll=10)
    assert (code, recorder.seen) == (1, [2, 4])
    # Nine sleeps a sign; the last is seen as soon as it is there.
    assert script.now == pytest.approx(1000 + 90 * len(signs) + 100, abs=1)


def test_patience_is_not_for_what_is_there(play: Play, training: Training) -> None:
    """A long evaluation uses it up; what waits by then is evaluated all the same."""
    recorder = Recorder()
    training.saves(2, 4, 6)()
    script_now: list[Script] = []
    recorder.meanwhile[2] = lambda: setattr(script_now[0], "now", 10**6)
    recorder.meanwhile[4] = training.logs

    def remember() -> None:
        script_now.append(sys.modules["maml.run.watch"].time)  # type: ignore[attr-defined]

    recorder.ready = False
    code, _ = play(recorder, remember, lambda: setattr(recorder, "ready", True))
    assert (code, recorder.seen) == (1, [2, 4, 6])


def test_a_configuration_that_changes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that continues with other queries is evaluated with those."""
    for iteration in (6, 7):
        numbered_checkpoint(directory, iteration).rename(directory / f"{iteration}.pt")
    other = with_values(run_directory.read_config(directory), eval_queries=5)

    def continues() -> None:
        run_directory.write_config(directory, other)
        for iteration in (6, 7):
            (directory / f"{iteration}.pt").rename(numbered_checkpoint(directory, iteration))

    script = Script(continues)
    monkeypatch.setattr("maml.run.watch.time", script)
    assert command(directory) == 0
    found = rows(directory)
    assert [(row["iteration"], row["eval_queries"]) for row in found] == [
        (2, 2), (4, 2), (6, 5), (7, 5),
    ]  # fmt: skip
    for row, config in zip(found, [CONFIG, CONFIG, other, other], strict=True):
        exact = exactly(directory, config, row["iteration"])
        assert {name: row[name] for name in exact} == exact


def test_a_configuration_that_comes_late(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = directory / "hidden.yaml"
    (directory / "config.yaml").rename(hidden)
    script = Script(nothing, lambda: hidden.rename(directory / "config.yaml"))
    monkeypatch.setattr("maml.run.watch.time", script)
    assert command(directory) == 0
    assert iterations(directory) == [2, 4, 6, 7]
