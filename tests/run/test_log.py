"""Where numbers go: the file always, a sink beside it if it works, and a full disk is one line."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from maml.errors import UserError
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.run import log
from maml.run.directory import read_status
from maml.run.log import RunLog
from tests.launching import TRAIN, run, start
from tests.runs import as_flags, glyphs, last, metrics, result, sinusoid, train

pytestmark = pytest.mark.usefixtures("no_pictures")


# ---- the file ---------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a full disk under metrics.jsonl once a run has begun.

    Not before: it reads rows that are there, and /dev/full is an endless file.
    """

    def begin(log: RunLog, iteration: int) -> None:
        log._path.symlink_to("/dev/full")

    monkeypatch.setattr(RunLog, "forget_after", begin)


@pytest.mark.usefixtures("full_disk")
def test_full_disk_under_metrics_is_one_line(tmp_path: Path) -> None:
    """What was trained until then is saved, as there is room for it elsewhere."""
    with pytest.raises(UserError, match=rf"^{tmp_path}/metrics\.jsonl: .*No space left") as caught:
        train(sinusoid(iterations=40, log_every=29), tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert last(tmp_path)["iteration"] == 29
    status = read_status(tmp_path)
    assert status is not None and (status["state"], status["iteration"]) == ("failed", 29)


DAMAGE = {
    "no row": (b'{"a": 1}\n', 1),
    "no number": (b'{"iteration": 1, "loss": "0.5"}\n', 1),
    "no text": (b'{"iteration": 1}\n\xff\xfe\n{"iteration": 2}\n', 2),
    "garbage": (b'{"iteration": 1}\n{"iteration": 2, "lo\n{"iteration": 3}\n', 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line_and_stays(damage: str, tmp_path: Path) -> None:
    train(sinusoid(), tmp_path)
    content, line = DAMAGE[damage]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(UserError) as caught:
        train(sinusoid(iterations=4), tmp_path)
    assert str(caught.value).startswith(f"{path}: line {line} is not a row")
    assert len(str(caught.value).splitlines()) == 1
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_folder_in_place_of_the_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=rf"^{tmp_path}/metrics\.jsonl: is a folder$"):
        train(sinusoid(), tmp_path)
    assert not (tmp_path / "config.yaml").exists()


# ---- sinks ------------------------------------------------------------------------------------


class Sink:
    """Remembers rows; fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.rows, self.closed = fails, [], 0  # type: ignore[var-annotated]
        self.pictures: dict[str, Path] = {}
        self._maybe("init")

    def write(self, row: dict[str, Any]) -> None:
        self._maybe("write")
        self.rows.append(row)

    def picture(self, name: str, path: Path, iteration: int) -> None:
        self.pictures[name] = path

    def close(self) -> None:
        self.closed += 1
        self._maybe("close")

    def _maybe(self, where: str) -> None:
        if where == self.fails:
            raise ConnectionError(f"no answer at {where}\nand a second line")


def test_a_sink_gets_the_rows_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Sink()
    monkeypatch.setitem(log.SINKS, "wandb", lambda run_dir, config: sink)
    train(glyphs(iterations=4, eval_every=2, test_tasks=3), tmp_path, logger="wandb")
    assert sink.rows == metrics(tmp_path)
    assert [row.get("split") for row in sink.rows] == [
        *(None, None, "validation", None, None, "validation", "test")
    ]
    assert sink.rows[-1]["accuracy"] == result(tmp_path)["transductive_accuracy"]
    assert sink.closed == 1
    assert sink.pictures == {
        f"pictures/{name}": tmp_path / f"{name}.png" for name in ("curves", "task")
    }
    assert "--logger" not in capsys.readouterr().err


@pytest.mark.parametrize("where", ["init", "write", "close"])
def test_a_failing_sink_never_stops_training(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(log.SINKS, "wandb", lambda run_dir, config: Sink(where))
    train(sinusoid(iterations=4, logger="wandb", test_tasks=4), tmp_path)
    assert len(metrics(tmp_path)) == 5
    assert (tmp_path / "result.json").exists()
    said = [line for line in capsys.readouterr().err.splitlines() if "--logger" in line]
    assert len(said) == 1
    assert f"--logger wandb: no answer at {where}" in said[0]


def test_a_tested_run_is_tested_anew(tmp_path: Path) -> None:
    """Its earlier row of a test is not doubled."""
    for tasks in (3, 4):
        train(sinusoid(), tmp_path, test_tasks=tasks)
    rows = metrics(tmp_path)
    assert [row.get("split") for row in rows] == [None, None, "test"]
    assert rows[-1]["tasks"] == 4


def test_a_silent_sink_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for a server that does not answer, until the test ends."""
    answer = threading.Event()
    sink = Sink()
    sink.write = lambda row: answer.wait(600)  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(log, "LAST_WORDS", 0.1)
    monkeypatch.setitem(log.SINKS, "wandb", lambda run_dir, config: sink)
    train(sinusoid(iterations=4, logger="wandb"), tmp_path)
    assert len(metrics(tmp_path)) == 4
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "--logger" in line]
    assert said.endswith("not done after 0.1 s more, and left behind; metrics.jsonl has all")
    answer.set()


@pytest.mark.slow
def test_a_silent_server_of_wandb(tmp_path: Path) -> None:
    """The real library and a server that takes connections and says nothing: bounded at the end.

    The command fails if a process of the library is left behind, or if it takes as long as the
    library alone would wait.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        environment = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "0123456789" * 4,
            "HOME": str(tmp_path),
        }
        config = sinusoid(run_dir=str(tmp_path / "run"), logger="wandb", iterations=3)
        code = (
            "import sys, train_maml, maml.run.log as log\n"
            "log.LAST_WORDS = 2.0\n"
            "from maml.processes.program import run_program\n"
            "run_program(train_maml.main, sys.argv[1:])\n"
        )
        done = run([sys.executable, "-c", code, *as_flags(config)], 60, env=environment)
    assert len(metrics(tmp_path / "run")) == 3
    assert "--logger wandb: not done after 2 s more" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_numbers() -> None:
    row = {
        "iteration": 7, "loss": 0.5, "split": "validation", "tasks": 4, "note": "text",
        "time": {"computing": 1.5}, "staleness": [3, 0],
    }  # fmt: skip
    expected = {
        "validation/loss": 0.5, "validation/tasks": 4.0, "validation/time/computing": 1.5,
        "validation/staleness/0": 3.0, "validation/staleness/1": 0.0,
    }  # fmt: skip
    assert log.step_and_values(row) == (7, expected)
    assert log.step_and_values({"iteration": 1, "loss": 2.0}) == (1, {"train/loss": 2.0})


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with pictures
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = {"iterations": 4, "log_every": 2, "eval_every": 4, "test_tasks": 2}
    train(glyphs(logger="tensorboard", learner="metasgd", **values), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for row in metrics(tmp_path):
        step, values = log.step_and_values(row)
        for name, value in values.items():
            found = [event.value for event in events.Scalars(name) if event.step == step]
            assert found == [pytest.approx(value, rel=1e-6)]
    scalars = set(events.Tags()["scalars"])
    assert {"train/loss", "train/time/computing", "validation/after/0", "train/gradient_norm"} <= (
        scalars
    )
    assert set(events.Tags()["images"]) == {"pictures/curves", "pictures/task"}


def test_none_writes_nothing_beside_the_file(tmp_path: Path) -> None:
    train(sinusoid(logger="none"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "checkpoints", "config.yaml", "metrics.jsonl", "result.json", "status.json",
    }  # fmt: skip


def test_wandb_without_a_key_runs_offline(tmp_path: Path) -> None:
    """The real library, in a home without settings, standard input closed: no prompt, no account.

    The command fails if a process of the library is left behind.
    """
    home, directory = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    config = sinusoid(run_dir=str(directory), logger="wandb", iterations=3)
    done = run([*TRAIN, *as_flags(config)], 120, env={"HOME": str(home)})
    assert "--logger" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    (binary,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    content = binary.read_bytes()
    values = [v for row in metrics(directory) for v in log.step_and_values(row)[1].values()]
    assert len(metrics(directory)) == 3
    assert all(str(value).removesuffix(".0").encode() in content for value in values)
    assert b"git_commit" in content  # what it was made with


def test_wandb_is_switched_off(tmp_path: Path) -> None:
    """As its users do, for one run or for all."""
    config = sinusoid(run_dir=str(tmp_path / "run"), logger="wandb", test_tasks=2)
    done = run([*TRAIN, *as_flags(config)], 120, env={"WANDB_MODE": "disabled"})
    assert "wandb" not in done.stderr, done.stderr
    assert (tmp_path / "run" / "curves.png").exists()
    assert not (tmp_path / "run" / "wandb").exists()


def test_wandb_knows_a_run_again_that_goes_on(tmp_path: Path) -> None:
    """Two starts in one run directory are two parts of one run; another directory is another."""
    one, other = tmp_path / "one", tmp_path / "other"
    for starts in ({"one": 2, "other": 2}, {"one": 4}):
        runs = {
            name: as_flags(sinusoid(logger="wandb", iterations=iterations))
            for name, iterations in starts.items()
        }
        command = [sys.executable, "-m", "tests.strategies.topologies", str(tmp_path)]
        done = run([*command, json.dumps(runs)], 120, env={"WANDB_MODE": "offline"})
        assert "--logger" not in done.stderr, done.stderr
    parts = [path.stem for path in one.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(parts) == 2
    (name,) = set(parts)
    (another,) = {path.stem for path in other.glob("wandb/offline-run-*/run-*.wandb")}
    assert another != name


# ---- full disks -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 256 KiB; skips where mounting one is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=256k")
    if mounted != 0:
        pytest.skip(f"cannot mount a small disk: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


def fill(folder: Path) -> None:
    """Use up the rest of a disk."""
    try:
        with open(folder / "filler", "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def test_a_disk_that_fills_up_while_training(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing more can be saved, the status is right all the same, written in its place."""
    directory, step = small_disk / "run", OuterOptimizer.step

    def filling(optimizer: OuterOptimizer, *args: Any) -> None:
        step(optimizer, *args)
        fill(small_disk)

    with monkeypatch.context() as patched:
        patched.setattr(OuterOptimizer, "step", filling)
        with pytest.raises(UserError, match=rf"^{directory}/metrics\.jsonl: .*No space left"):
            train(sinusoid(iterations=10**6), directory)
    status = read_status(directory)
    assert status is not None and status["state"] == "failed"
    (small_disk / "filler").unlink()
    assert train(sinusoid(iterations=4), directory)["iteration"] == 4


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        pytest.param("rpc", marks=pytest.mark.slow),
        pytest.param("param-server", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_under_every_strategy(strategy: str, small_disk: Path) -> None:
    """One line, and the exit code of bad files, whichever process ends first."""
    config = sinusoid(iterations=10**9, run_dir=str(small_disk / "run"), strategy=strategy)
    launched = start([sys.executable, "-m", "launch.workers", *as_flags(config), "--workers", "2"])
    launched.wait_for("iterations 0 to", timeout=120)
    fill(small_disk)
    done = launched.wait(60, expect=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "rror" in line or "launch/" in line]
    assert re.match(rf"error: {small_disk}/run/.*: No space left on device", line)
