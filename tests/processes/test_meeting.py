"""The name of a start, which all its ranks share, and what tells processes apart."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from subprocess import PIPE

import pytest
from torch.distributed import TCPStore

from maml.errors import WorkerLostError
from maml.processes.identity import Identity, started
from maml.processes.speaker import speaks_for_host
from maml.processes.store import meet


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A store that outlives every start, as torchrun's does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    yield store.port


def join(port: int, rank: int, size: int, seconds: float = 20) -> str:
    """Meet over a connection of its own, as a process has."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    return meet(store, rank, size, seconds)


def test_who_comes_before_rank_zero_waits_for_the_new_one(port: int) -> None:
    """The store still has the name of the earlier start, which an early rank must not take."""
    with ThreadPoolExecutor(2) as pool:
        (before,) = set(pool.map(lambda rank: join(port, rank, 2), range(2)))
        early = pool.submit(join, port, 1, 2)
        time.sleep(1.5)
        assert not early.done()
        late = pool.submit(join, port, 0, 2)
        assert early.result() == late.result() != before


def test_who_does_not_come_is_named(port: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        rank_zero, one = pool.submit(join, port, 0, 3, 2), pool.submit(join, port, 1, 3, 2)
        with pytest.raises(WorkerLostError, match="rank 2 did not join the start within 2 s"):
            rank_zero.result()
        one.result()


def test_one_process_of_a_host_speaks() -> None:
    """Another one may, once the first has ended."""
    name = uuid.uuid4().hex
    code = f"from maml.processes.speaker import *\nprint(speaks_for_host({name!r}))\ninput()"
    child = subprocess.Popen([sys.executable, "-u", "-c", code], stdin=PIPE, stdout=PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"True\n"
    assert not speaks_for_host(name)
    child.communicate(b"\n", timeout=60)
    assert speaks_for_host(name) and speaks_for_host(name)


@pytest.mark.parametrize("in_sight", [False, True])
def test_a_process_from_beginning_to_end(in_sight: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE)
    identity = Identity.own()._replace(pid=child.pid, since=started(child.pid))
    if in_sight:
        identity.keep_in_sight()
    assert not identity.is_gone() and identity.resident() > 0
    assert started(child.pid) == identity.since
    # The same process id, but with another start time, or of another boot.
    assert identity._replace(since=identity.since + "0").is_gone()
    boot, space = identity.place.split()
    assert identity._replace(place=f"{boot}0 {space}").is_gone()
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert identity.state() == "T"
    assert identity.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_gone(), "a process that nobody has waited for is gone as well"
    child.wait()
    assert identity.is_gone() and not identity.kill()
    # Nothing is known of another host, or of another container.
    assert not identity._replace(host="another").is_gone()
    assert not identity._replace(place=f"{boot} pid:[1]").is_gone()
    assert not Identity.own().is_gone()
