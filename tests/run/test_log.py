"""Where numbers go: the file always, a sink if it works; a full disk is one line."""

import contextlib
import ctypes
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from maml.errors import UserError
from maml.run import log, progress
from maml.run.directory import read_status
from maml.run.log import RunLog
from tests.launching import run, start
from tests.runs import as_flags, glyphs, last, metrics, sinusoid, train

pytestmark = pytest.mark.usefixtures("no_pictures")


# ---- the file ---------------------------------------------------------------------------------


def test_full_disk_under_metrics_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    """The disk is full only after the start: a run reads its rows, and /dev/full has no end."""
    full = lambda log, iteration: setattr(log, "_path", Path("/dev/full"))  # noqa: E731
    monkeypatch.setattr(RunLog, "forget_after", full)
    with pytest.raises(UserError, match=r"^/dev/full: cannot write: No space left"):
        train(sinusoid(iterations=40, log_every=29), tmp_path)
    assert last(tmp_path)["iteration"] == 29
    status = read_status(tmp_path)
    assert status is not None and (status["state"], status["iteration"]) == ("failed", 29)


def test_a_damaged_file_is_one_line_and_stays(tmp_path: Path) -> None:
    train(sinusoid(), tmp_path)
    path = tmp_path / "metrics.jsonl"
    for content, line in (
        (b'{"iteration": 1, "loss": "0.5"}\n', 1),
        (b'{"iteration": 1}\n\xff\xfe\n{"iteration": 2}\n', 2),
        (b'{"iteration": 1}\n{"iteration": 2, "lo\n{"iteration": 3}\n', 2),
    ):
        path.write_bytes(content)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        with pytest.raises(UserError, match=f"^{path}: line {line} is not a row"):
            train(sinusoid(iterations=4), tmp_path)
        after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        assert before == after


def test_redirected_output_has_whole_lines(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Of training and evaluation, and a message between them."""
    monkeypatch.setattr(progress, "PLAIN", 0.0)
    train(sinusoid(iterations=3, eval_every=2, test_tasks=9), tmp_path)
    said = capsys.readouterr().err
    assert "\r" not in said and "\x1b" not in said
    lines = said.splitlines()
    assert lines[0].startswith("training: 1 of 3 it, ")
    assert [line for line in lines if line.startswith("iteration 2: validation loss ")]
    assert [line for line in lines if line.startswith("training: 3 of 3 it, ")]
    assert [line for line in lines if line.startswith("test: 9 of 9 task, ")]


# ---- sinks ------------------------------------------------------------------------------------


def test_a_sink_gets_the_rows_of_the_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    sink = MagicMock()
    monkeypatch.setitem(log.SINKS, "wandb", lambda run_dir: sink)
    train(glyphs(iterations=4, eval_every=2, test_tasks=3), tmp_path, logger="wandb")
    rows = metrics(tmp_path)
    written = [call.args for call in sink.__enter__().call_args_list]
    assert written == [log.step_and_values(row) for row in rows]
    assert [row.get("split") for row in rows] == [
        *(None, None, "validation", None, None, "validation", "test")
    ]
    sink.__exit__.assert_called_once_with(None, None, None)
    assert "--logger" not in capsys.readouterr().err


def test_a_failing_sink_never_stops_training(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    sink = "return_value.__enter__.return_value."
    of_sink = {"init": "", "write": sink, "close": "return_value.__exit__."}
    for where, name in of_sink.items():
        error = ConnectionError(f"no answer at {where}\nand a second line")
        monkeypatch.setitem(log.SINKS, "wandb", MagicMock(**{f"{name}side_effect": error}))
        train(sinusoid(logger="wandb", test_tasks=4), tmp_path / where)
        assert (tmp_path / where / "result.json").exists()
        (said,) = [line for line in capsys.readouterr().err.splitlines() if "--logger" in line]
        assert f"--logger wandb: no answer at {where}" in said


def test_a_silent_sink_holds_nobody_up(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """It waits for a server that does not answer, until the test ends."""
    answer = threading.Event()
    sink = MagicMock(**{"__enter__.return_value.side_effect": lambda *_: answer.wait(600)})
    monkeypatch.setattr(log, "LAST_WORDS", 0.1)
    monkeypatch.setitem(log.SINKS, "wandb", lambda run_dir: sink)
    train(sinusoid(iterations=4, logger="wandb"), tmp_path)
    assert len(metrics(tmp_path)) == 4
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "--logger" in line]
    assert said.endswith("abandoned after 0.1 s without an end; metrics.jsonl has all rows")
    answer.set()


def test_tensorboard(tmp_path: Path) -> None:
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
    assert {"train/loss", "train/time/computing", "validation/after/0"} <= scalars


def test_wandb_without_a_key_runs_offline(tmp_path: Path) -> None:
    """The real library, in a home without settings, standard input closed: no prompt, no account.

    Two starts in one run directory are two parts of one run; another directory is another. The
    command fails if a process of the library is left behind.
    """
    one, other, home = (tmp_path / name for name in ("one", "other", "home"))
    home.mkdir()
    for starts in ({"one": 2, "other": 2}, {"one": 4}):
        runs = {
            name: as_flags(sinusoid(logger="wandb", iterations=iterations))
            for name, iterations in starts.items()
        }
        command = [sys.executable, "-m", "tests.strategies.topologies", str(tmp_path)]
        done = run([*command, json.dumps(runs)], 240, env={"HOME": str(home)})
        assert "--logger" not in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    parts = list(one.glob("wandb/offline-run-*/run-*.wandb"))
    (another,) = other.glob("wandb/offline-run-*/run-*.wandb")
    assert len(parts) == 2 and len({path.stem for path in [*parts, another]}) == 2
    content = b"".join(path.read_bytes() for path in parts)
    values = [v for row in metrics(one) for v in log.step_and_values(row)[1].values()]
    assert all(str(value).removesuffix(".0").encode() in content for value in values)
    assert b"git_commit" in content  # what it was made with


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


@pytest.mark.parametrize(
    "strategy",
    ["allreduce", *(pytest.param(s, marks=pytest.mark.slow) for s in ("rpc", "param-server"))],
)
def test_a_full_disk_under_every_strategy(strategy: str, small_disk: Path) -> None:
    """One line, and the exit code of bad files, whichever process ends first."""
    config = sinusoid(iterations=10**9, run_dir=str(small_disk / "run"), strategy=strategy)
    launched = start([sys.executable, "-m", "launch.workers", *as_flags(config), "--workers", "2"])
    launched.wait_for("iterations 0 to", timeout=120)
    with contextlib.suppress(OSError), open(small_disk / "filler", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    done = launched.wait(60, expect=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "rror" in line or "launch/" in line]
    assert re.match(rf"error: {small_disk}/run/.*: No space left on device", line)
