"""A process waits for a lock while the holder works, and no longer; it can name the holder."""

import errno
import os
import platform
import signal
import sys
import time
from unittest.mock import Mock

import pytest

from datasets import locks
from datasets.locks import HeldError, Lock
from tests.launching import start, until

HOLD = """
import sys, time
from pathlib import Path
from datasets import locks
locks.BEAT_S = 0.2
with locks.Lock(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""
# The lock of another program, which gives no signs of life.
STRANGER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """Start a process that holds ``tmp_path / "lock"`` for some seconds."""
    monkeypatch.setattr(locks, "PATIENCE_S", 2.0)
    monkeypatch.setattr(locks, "BEAT_S", 0.5)
    children = []

    def begin(code, seconds=600.0):
        child = start([sys.executable, "-c", code, str(tmp_path / "lock"), str(seconds)])
        children.append(child)
        child.wait_for("held", 120)
        return child

    yield begin
    for child in children:
        child.kill()


def test_who_works_is_waited_for_and_named(hold, tmp_path, capfd):
    """The holder works for twice as long as a process waits for a silent holder."""
    child = hold(HOLD, 4.0)
    with Lock(tmp_path / "lock").held():
        child.wait(60)
    (line,) = capfd.readouterr().err.splitlines()
    named = f"held by process {child.process.pid} of {platform.node()} since 20"
    assert line.startswith(f"waiting for {tmp_path}/lock: {named}")


@pytest.mark.parametrize("stopped", [False, True])
def test_who_is_silent_is_waited_for_no_longer(hold, tmp_path, capfd, stopped):
    child = hold(HOLD if stopped else STRANGER)
    if stopped:
        child.process.send_signal(signal.SIGSTOP)
    holder = f"process {child.process.pid} of {platform.node()} since"
    named = holder if stopped else "another process"
    with (
        pytest.raises(HeldError, match=f"lock: held by {named}.*silent for 2 s"),
        Lock(tmp_path / "lock").held(needed=True),
    ):
        pass
    with Lock(tmp_path / "lock").held():
        assert child.process.poll() is None
        before = (tmp_path / "lock").stat().st_mtime_ns
        time.sleep(1.2)
        assert (tmp_path / "lock").stat().st_mtime_ns == before, "no sign of life for the holder"
    said = capfd.readouterr().err
    assert said.count(f"held by {named}") == 3 and "it is not waited for any longer" in said


def test_a_folder_without_locks_has_no_waiting_but_signs_of_life(tmp_path, monkeypatch):
    lock = Lock(tmp_path / "lock")
    refused = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=refused))
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    assert not lock.acquire()
    with lock.held():
        before = lock.path.stat().st_mtime_ns
        until(lambda: lock.path.stat().st_mtime_ns > before)
    monkeypatch.undo()
    assert lock.acquire()
    assert lock.holder().startswith(f"process {os.getpid()} of ")
