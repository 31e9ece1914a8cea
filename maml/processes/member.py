"""A process of a run: how others name it, and how those of its host look at it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

import psutil

KILLED = 2.0
"""Seconds that a killed process takes at most to be gone."""


class Member(NamedTuple):
    """One process of a run.

    Attributes:
        rank: Its rank.
        host: Its host's name, for people.
        pid: Its process id, there.
        since: When it was started, a Unix time: process ids are used again.
        place: The same for processes that see each other's process ids. A name is not enough:
            two containers may have the same.
    """

    rank: int
    host: str
    pid: int
    since: float
    place: str

    @classmethod
    def own(cls, rank: int) -> Member:
        """Return this process."""
        since = psutil.Process().create_time()
        return cls(rank, socket.gethostname(), os.getpid(), since, _place())

    @classmethod
    def from_text(cls, text: str) -> Member:
        """Return what `to_text` wrote."""
        return cls(*json.loads(text))

    def to_text(self) -> str:
        """Return it as text, for the store."""
        return json.dumps(self)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def is_near(self) -> bool:
        """Whether this process sees it among the processes of its own host."""
        return self.place == _place()

    def process(self) -> psutil.Process | None:
        """Return the process of one that `is_near`; None where it has ended."""
        try:
            process = psutil.Process(self.pid)
            ended = process.create_time() != self.since
            return None if ended or process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.Error:
            return None

    def is_stopped(self) -> bool:
        """Whether one that `is_near` was stopped by a signal (SIGSTOP, SIGTSTP)."""
        process = self.process()
        try:
            return process is not None and process.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def kill(self) -> bool:
        """Kill one that `is_near`; return whether it was there."""
        process = self.process()
        try:
            if process is not None:
                process.kill()
        except psutil.Error:
            return False
        deadline = time.monotonic() + KILLED
        while self.process() is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        return process is not None


def _place() -> str:
    """Return the same text in all processes that see each other's process ids."""
    try:
        # Of this start of this machine, and of the container.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
