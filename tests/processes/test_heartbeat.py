"""Waiting for rank zero without a time limit: as long as it lives."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from maml.errors import WorkerLostError
from maml.processes import heartbeat
from maml.processes.heartbeat import Heartbeat


class Work:
    """A collective that is done after some seconds, as torch's Work answers."""

    def __init__(self, seconds: float, error: str = "", late: float = 0.0) -> None:
        self.done_at = time.monotonic() + seconds
        self.error, self.late = error, late

    def is_completed(self) -> bool:
        return time.monotonic() >= self.done_at

    def wait(self, timeout: timedelta | None = None) -> None:
        until = self.done_at
        if timeout is not None:
            until = min(until, time.monotonic() + timeout.total_seconds())
        time.sleep(max(0.0, until - time.monotonic()))
        if self.late and timeout is not None:
            # Done between the end of the time and the look at whether it is done.
            time.sleep(self.late)
            raise RuntimeError("Operation timed out!")
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "POLL", 0.02)


def wait(work: Work, *, beating: bool = False, patience: float = 3.0) -> float:
    """Wait on rank 1; return the seconds it took. Rank 0 has lived, and may go on living."""
    store = HashStore()
    store.set("heartbeat", "1")
    began = time.monotonic()
    with Heartbeat(store, rank=0 if beating else 2, patience=patience).beating():
        waiting = Heartbeat(store, rank=1, patience=patience)
        with waiting.beating():
            waiting.wait(work)  # type: ignore[arg-type]
    return time.monotonic() - began


def test_a_living_rank_zero_is_waited_for() -> None:
    assert wait(Work(3.5), beating=True, patience=1.5) > 3.0


def test_a_silent_one_is_not() -> None:
    with pytest.raises(WorkerLostError):
        wait(Work(60), patience=0.3)


def test_a_failure_is_passed_on() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        wait(Work(0.1, error="connection closed"), beating=True)


def test_done_when_the_time_is_up() -> None:
    """It timed out and was done a moment later: no failure."""
    wait(Work(0.03, late=0.05), beating=True)


def test_threads_end() -> None:
    wait(Work(0.2), beating=True)
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_rank_zero_waits_for_nobody_for_ever() -> None:
    """One of the others was frozen before it took part; rank zero's own heartbeat is no comfort."""
    waiting = Heartbeat(HashStore(), rank=0, patience=0.1)
    with waiting.beating(), pytest.raises(RuntimeError, match="timed out"):
        waiting.wait(Work(60))  # type: ignore[arg-type]
