"""Stop signals: a run ends with a checkpoint and a sentence, and continues from there."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from maml.config.presets import with_values
from maml.run.checkpoint import last_checkpoint
from maml.strategies.local import Local
from maml.trainer import Trainer
from tests.launching import TRAIN, start, torchrun
from tests.runs import as_flags, last, metrics, sinusoid
from tests.strategies.faults import planted, wait_for_iteration

pytestmark = pytest.mark.usefixtures("no_pictures")

ENDLESS = sinusoid(iterations=10**9, compile="off")


def check_stopped(run_dir: Path, name: str, stdout: str, stderr: str) -> int:
    """Check what a stopped run leaves and says; return the iteration it reached."""
    reached = last(run_dir)["iteration"]
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == list(range(1, reached + 1))
    (said,) = re.findall(r"stopped by .*", stdout)
    assert said.startswith(f"stopped by {name} after iteration {reached}; ")
    assert str(last_checkpoint(run_dir)) in said
    assert re.search(f"--run-dir {run_dir}( --resume auto)? continues", said)
    assert "Traceback" not in stderr
    assert "error: " not in stderr
    assert not (run_dir / "result.json").exists()
    return reached


ENDS = {"SIGINT": 130, "SIGQUIT": 131}


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGINT ends with 130, SIGQUIT with 131; the same command continues."""
    configs = {name: with_values(ENDLESS, run_dir=str(tmp_path / name)) for name in ENDS}
    anew = {"SIGINT": [], "SIGQUIT": ["--resume", "never"]}
    runs = {name: start([*TRAIN, *as_flags(configs[name]), *anew[name]]) for name in ENDS}
    for name, launched in runs.items():
        wait_for_iteration(launched, tmp_path / name, 5, limit=90)
        launched.process.send_signal(signal.Signals[name])
    reached = {}
    for name, launched in runs.items():
        done = launched.wait(60, expect=ENDS[name])
        reached[name] = check_stopped(tmp_path / name, name, done.stdout, done.stderr)
        assert ("--resume auto continues" in done.stdout) == bool(anew[name])
    for name, iteration in reached.items():
        assert Trainer(with_values(configs[name], iterations=iteration + 2)).run() == 0
        assert f"iterations {iteration} to {iteration + 2}" in capsys.readouterr().out
        rows = metrics(tmp_path / name)
        assert [row["iteration"] for row in rows] == list(range(1, iteration + 3))


def test_stopped_before_training_begins(tmp_path: Path) -> None:
    """While libraries load there is nothing to save: the program ends without a traceback."""
    code = """
import maml.trainer, signal
def main(arguments):
    # A job that a shell started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    while True:  # another thread may take it, and the main one hears of it a little later
        time.sleep(0.01)
train_maml.main = main
"""
    done = start([sys.executable, planted(tmp_path, code)]).wait(60, expect=130)
    assert done.stderr == "interrupted\n"


def test_torchrun(tmp_path: Path) -> None:
    """A terminal or a scheduler signals all processes: both ranks stop at one checkpoint.

    torchrun adds words of its own; the launch checks that no process survives.
    """
    config = with_values(ENDLESS, run_dir=str(tmp_path), partition="chunk")
    launched = start([*torchrun(2), *as_flags(config)])
    wait_for_iteration(launched, tmp_path, 3, limit=90)
    launched.signal_group(signal.SIGTERM)
    done = launched.wait(90, expect=None)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if "train_maml.py" in line]
    assert not any("File " in line for line in ours), done.stderr
    torchruns_own = done.stderr.split("Traceback")[0]
    assert check_stopped(tmp_path, "SIGTERM", done.stdout, torchruns_own) >= 3


def test_ctrl_c_under_launch_local(tmp_path: Path) -> None:
    """It reaches the workers twice, from the terminal and from the launcher, and is one Ctrl-C."""
    config = with_values(ENDLESS, run_dir=str(tmp_path), learner="tests.launch.test_slurm:Slow")
    launched = start([sys.executable, "-m", "launch.workers", *as_flags(config), "--workers", "2"])
    wait_for_iteration(launched, tmp_path, 3, limit=90)
    launched.signal_group(signal.SIGINT)
    done = launched.wait(90, expect=130)
    check_stopped(tmp_path, "SIGINT", done.stdout, done.stderr)


TERMINAL = """
import contextlib, os, pty, select, signal, sys, time
from pathlib import Path

pid, terminal = pty.fork()
if not pid:
    os.execvp(sys.argv[2], sys.argv[2:])
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
    with contextlib.suppress(OSError):  # nobody writes there
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 4096)
os.close(terminal)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Runs a command in a terminal, which is closed once a file is there; ends as the command does."""


def test_a_closed_terminal(tmp_path: Path) -> None:
    """A closed laptop, a lost connection: SIGHUP comes, and whatever is printed fails.

    What was started under nohup goes on.
    """
    closed, launched = tmp_path / "closed", {}
    for name, before in {"run": [], "nohup": ["nohup"]}.items():
        config = with_values(ENDLESS, run_dir=str(tmp_path / name))
        command = [sys.executable, "-m", "launch.workers", *as_flags(config), "--workers", "2"]
        within = [sys.executable, "-c", TERMINAL, str(closed), *before, *command]
        launched[name] = start(within, cwd=tmp_path)
    for name, one in launched.items():
        wait_for_iteration(one, tmp_path / name, 3, limit=90)
    closed.touch()
    launched["run"].wait(90, expect=129)
    went_on = tmp_path / "nohup"
    wait_for_iteration(launched["nohup"], went_on, len(metrics(went_on)) + 20, limit=90)
    launched["nohup"].process.send_signal(signal.SIGTERM)
    launched["nohup"].wait(90, expect=143)
    for name in launched:
        status = json.loads((tmp_path / name / "status.json").read_text())
        rows = [row["iteration"] for row in metrics(tmp_path / name)]
        assert status["state"] == "stopped"
        assert rows == list(range(1, last(tmp_path / name)["iteration"] + 1))


def test_while_testing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stop during the test ends soon, keeps what was trained, and says so."""
    evaluate = Local.evaluate

    def stopped(strategy: Local, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(strategy, *args)

    monkeypatch.setattr(Local, "evaluate", stopped)
    assert Trainer(sinusoid(iterations=1, test_tasks=10**6, run_dir=str(tmp_path))).run() == 143
    assert check_stopped(tmp_path, "SIGTERM", *capsys.readouterr()) == 1


def test_while_pictures_are_drawn(tmp_path: Path) -> None:
    """The run stays finished, and a line names the command that draws the pictures."""
    code = """
import signal
from maml.processes import signals
from maml.training import testing
def draw(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)
signals.PATIENCE, testing.draw_curves = 0.1, draw
"""
    run_dir = tmp_path / "run"
    config = sinusoid(iterations=1, test_tasks=2, run_dir=str(run_dir))
    command = [sys.executable, planted(tmp_path, code), *as_flags(config)]
    done = start(command).wait(60, expect=143)
    said = f"finished, and its result in {run_dir}; python -m maml.plots {run_dir} draws"
    assert said in done.stdout
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    assert (run_dir / "result.json").exists() and "Traceback" not in done.stderr


def test_in_the_middle_of_a_long_iteration(tmp_path: Path) -> None:
    """The step is abandoned, and the last whole state is saved within seconds.

    The step sleeps in C, where Python handles no signal: a deep network's backward is like that.
    """
    code = """
import ctypes
from maml.processes import signals
from maml.worker import Worker
meta_gradient, calls = Worker.share, []
signals.PATIENCE = 1.0
def slow(self, *args):
    calls.append(1)
    if len(calls) == 4:
        while True:
            ctypes.CDLL(None).sleep(600)
    return meta_gradient(self, *args)
Worker.share = slow
"""
    run_dir = tmp_path / "run"
    config = with_values(ENDLESS, run_dir=str(run_dir))
    launched = start([sys.executable, planted(tmp_path, code), *as_flags(config)])
    wait_for_iteration(launched, run_dir, 3, limit=90)
    time.sleep(1.5)
    launched.process.send_signal(signal.SIGTERM)
    done = launched.wait(60, expect=143)
    assert check_stopped(run_dir, "SIGTERM", done.stdout, done.stderr) == 3
