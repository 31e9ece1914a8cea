"""What many processes on many hosts do to one folder: one at a time, and who of them lives."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from datasets import locks
from maml.errors import UserError

GRACE = 30.0
"""Seconds after which a lock of another machine, or a silent worker there, is given up."""
BEAT = 5.0
"""Seconds between two signs of life."""


def machine() -> str:
    """Return what tells this machine, since it was started, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class FolderLock:
    """Held by one process at a time, of all that share a folder.

    Between machines a symbolic link decides, which even old network folders make atomically.
    Within a machine the system's own lock does, which is gone with a killed process: so a link that
    names this machine was left behind, and goes at once. That of another machine goes when it has
    not changed for `GRACE` seconds.
    """

    def __init__(self, path: Path) -> None:
        self._link, self._machine = path, machine()
        self._local = path.with_name(f"{path.name}.{self._machine}")
        self._held: locks.Lock | None = None

    def acquire(self) -> None:
        """Wait until it is this process's.

        Raises:
            UserError: a process of this machine holds it for longer than any work takes.
        """
        local = locks.Lock(self._local)
        try:
            # Where this folder has no locks, the link alone decides.
            certain = local.acquire(locks.PATIENCE_S)
        except locks.HeldError as error:
            raise UserError(f"{error}; end it if it is stopped, then begin this again") from None
        self._held = local
        mine = f"{self._machine} {uuid.uuid4().hex}"
        seen, since = "", time.monotonic()
        try:
            while True:
                try:
                    os.symlink(mine, self._link)
                    return
                except FileExistsError:
                    pass
                holder = self._holder()
                if holder != seen:
                    seen, since = holder, time.monotonic()
                dead = certain and holder.startswith(f"{self._machine} ")
                if dead or (holder and time.monotonic() - since > GRACE):
                    with contextlib.suppress(OSError):
                        self._link.unlink()
                    continue
                time.sleep(0.01)
        except BaseException:
            local.release()
            raise

    def release(self) -> None:
        """Give it back."""
        with contextlib.suppress(OSError):
            self._link.unlink()
        # Another thread may hold it as soon as it is released.
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _holder(self) -> str:
        try:
            return os.readlink(self._link)
        except OSError:
            return ""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it within this context."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


class Presence:
    """This process among those that work in a folder: a file that it keeps changing, and a lock.

    Attributes:
        name: What other processes know it by.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._path = folder / f"{self.name}.json"
        self._lock = locks.Lock(folder / f"{self.name}.lock")
        self._lock.acquire()
        self._beats = 0
        self.beat()

    def beat(self) -> None:
        """Give a sign of life; every `BEAT` seconds is often enough."""
        self._beats += 1
        said = {"machine": machine(), "pid": os.getpid(), "beats": self._beats}
        # A folder that is away for a moment is no reason to end.
        with contextlib.suppress(OSError):
            self._path.write_text(json.dumps(said))

    def leave(self) -> None:
        """Say goodbye."""
        for path in (self._path, self._lock.path):
            with contextlib.suppress(OSError):
                path.unlink()
        self._lock.release()


ALIVE, UNSURE, GONE = "alive", "unsure", "gone"


class Others:
    """Which workers of a folder live, as this process sees it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # What each said last, since when, and whether it has said something new meanwhile.
        self._seen: dict[str, tuple[str, float, bool]] = {}

    def look(self, name: str) -> str:
        """Return whether a worker is `ALIVE`, or `GONE` without a word; `UNSURE`: ask again later.

        One of this machine is gone as soon as its lock is free. One of another machine, or of this
        one before it was started anew: when it has given no sign of life for `GRACE` seconds that
        this process has watched it.
        """
        try:
            said = (self._folder / f"{name}.json").read_text()
        except OSError:
            return GONE  # it has said goodbye
        certain = f'"{machine()}"' in said
        try:
            if locks.Lock(self._folder / f"{name}.lock").is_held():
                return ALIVE
        except OSError:
            certain = False  # this folder has no locks
        if certain:
            return GONE
        before, since, lives = self._seen.get(name, (said, time.monotonic(), False))
        if said != before:
            since, lives = time.monotonic(), True
        self._seen[name] = said, since, lives
        if time.monotonic() - since > GRACE:
            return GONE
        return ALIVE if lives else UNSURE
