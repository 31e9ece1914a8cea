"""A process of a run: how others name it, and how those of its host look at it."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

from maml.processes.identity import Identity

KILLED = 2.0
"""Seconds that a killed process takes at most to be gone."""


class Member(NamedTuple):
    """One process of a run."""

    rank: int
    identity: Identity

    @classmethod
    def own(cls, rank: int) -> Member:
        """Return this process."""
        return cls(rank, Identity.own())

    @classmethod
    def from_text(cls, text: str) -> Member:
        """Return what `to_text` wrote."""
        rank, identity = json.loads(text)
        return cls(rank, Identity(*identity))

    def to_text(self) -> str:
        """Return it as text, for the store."""
        return json.dumps(self)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.identity.host}, pid {self.identity.pid})"

    @property
    def is_near(self) -> bool:
        """Whether this process sees it among the processes of its own host."""
        return self.identity.place == Identity.own().place

    def has_ended(self) -> bool:
        """Whether one that `is_near` has ended; of others nothing is known."""
        return self.identity.is_gone()

    def is_stopped(self) -> bool:
        """Whether one that `is_near` was stopped by a signal (SIGSTOP, SIGTSTP)."""
        try:
            status = psutil.Process(self.identity.pid).status()
        except psutil.Error:
            return False
        return status == psutil.STATUS_STOPPED and not self.has_ended()

    def kill(self) -> bool:
        """Kill one that `is_near`; return whether it was there."""
        if self.has_ended():
            return False
        with suppress(OSError):
            os.kill(self.identity.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        return True
