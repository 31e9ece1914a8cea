"""Follow a run's checkpoints from another process, on another machine with a shared folder too.

Nothing but the run directory connects the two: training renames finished files into place and
never looks whether anybody reads them. So there are no locks, and no clock but this process's own:
files' times, which another machine's clock made, are compared with themselves alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from maml.errors import UserError
from maml.run import checkpoint, directory

SETTLE = 90.0
"""Seconds that a file named by the run's status may take to be seen from here: an NFS client may
show a folder as it was a minute ago (``acdirmax``)."""

Stamp = tuple[int, int, int]


class Evaluator(Protocol):
    """What is done with a run's checkpoints."""

    def prepare(self) -> bool:
        """Get ready as soon as the run directory says for what; return whether it is."""

    def evaluated(self) -> set[int]:
        """Return the iterations whose evaluations are written down."""

    def evaluate(self, saved: dict[str, Any]) -> None:
        """Evaluate a checkpoint's content and write the result down."""


def watch(directory: Path, evaluator: Evaluator, *, poll: float, patience: float) -> int:
    """Evaluate every numbered checkpoint of a run, each once, until its training is over.

    Args:
        directory: The run directory; it need not exist yet.
        evaluator: What to do with a checkpoint.
        poll: Seconds between looks.
        patience: Seconds after which to give up when nothing in the directory changes.

    Returns:
        The exit code: 0 when training has finished, or was stopped, and its last checkpoint is
        evaluated; 130 or 143 after SIGINT or SIGTERM; else 1, after a line that says why.

    Raises:
        UserError: if the evaluator does.
    """
    try:
        with _signals_raised():
            _warn(f"watching {directory}")
            return _Watch(directory, evaluator).run(poll, patience)
    except _Signalled as signalled:
        _warn(f"stopped by {signalled.name}; the same command goes on from here")
        return 128 + signalled.number


class _Watch:
    """What one watcher knows."""

    def __init__(self, directory: Path, evaluator: Evaluator) -> None:
        self.directory, self.evaluator = directory, evaluator
        self.done: set[int] = set()
        self.listed: set[int] = set()
        self.missed: set[int] = set()
        self.damaged: dict[int, Stamp | None] = {}

    def run(self, poll: float, patience: float) -> int:
        before: object = None
        changed = ended = time.monotonic()
        while True:
            # The status before the listing: what was saved before an end is listed after it.
            status = directory.read_status(self.directory)
            kept = checkpoint.numbered_checkpoints(self.directory)
            look = _stamps(self.directory)
            now = time.monotonic()
            if look != before:
                before, changed = look, now
            if status is None or status["state"] == "training":
                ended = now
            if self.evaluator.prepare():
                # Read anew each time: rows of an earlier watcher, or of another one.
                self.done |= self.evaluator.evaluated()
                self._report_missed(kept, status)
                if any(self._evaluate(n, path) for n, path in kept.items()):
                    continue  # one at a time: there is more to see by now
            if status is not None and status["state"] == "lost":
                # A launcher may start it again.
                if now - ended > SETTLE:
                    _warn(f"error: {self._lost(status)}")
                    return 1
            elif status is not None and status["state"] != "training":
                last_is_done = status["iteration"] in self.done
                seen = last_is_done or status["iteration"] in self.damaged
                if seen or status["state"] == "failed" or now - ended > SETTLE:
                    return self._end(status, last_is_done)
            left = patience - (now - changed)
            if left <= 0:
                _warn(f"error: {self._silence(status)} for {patience:g} s (--patience)")
                return 1
            time.sleep(min(poll, left))

    def _is_new(self, iteration: int, path: Path) -> bool:
        if iteration in self.damaged:
            # Another file of that name may be whole: the training went over it again.
            return self.damaged[iteration] != _stamp(path)
        return iteration not in self.done

    def _evaluate(self, iteration: int, path: Path) -> bool:
        """Evaluate a checkpoint that is new, or say that it is damaged; return whether it did."""
        if not self._is_new(iteration, path):
            return False
        stamp = _stamp(path)
        try:
            saved = checkpoint.load(path)
        except UserError as error:
            # Gone since it was listed, as training keeps only the newest few? Then not damaged.
            if not path.exists():
                return False
            self.damaged[iteration] = stamp
            _warn(f"{error}; left out")
            return True
        self.evaluator.evaluate(saved)
        self.done.add(iteration)
        self.damaged.pop(iteration, None)
        return True

    def _report_missed(self, kept: dict[int, Path], status: dict[str, Any] | None) -> None:
        """Say which checkpoints were deleted before they were evaluated, as far as is known.

        Those are: what was listed once, and what this training (not an earlier one of the same
        run) must have saved between its beginning and the newest checkpoint. What is newer than
        that was withdrawn by a training that went back, and will come again.
        """
        newest = max(kept, default=0)
        known = self.listed.union(kept)
        if status is not None:
            every = status["checkpoint_every"]
            known.update(range(every * (status["start"] // every + 1), newest, every))
        self.listed.update(kept)
        gone = {n for n in known if n < newest} - self.done - self.missed
        gone -= kept.keys() | self.damaged.keys()
        if gone:
            # A folder that changes while it is listed may leave out what was just made.
            gone -= checkpoint.numbered_checkpoints(self.directory).keys()
        if gone:
            self.missed |= gone
            keeps = f" {status['keep_checkpoints']}" if status else ""
            _warn(
                f"{_named(sorted(gone))}: deleted before evaluated; training keeps only the "
                f"newest few (--keep-checkpoints{keeps})"
            )

    def _end(self, status: dict[str, Any], last_is_done: bool) -> int:
        state, iteration = status["state"], status["iteration"]
        if state == "failed":
            _warn(f"error: {self.directory}: training failed after iteration {iteration}")
            return 1
        if not last_is_done:
            path = checkpoint.numbered_checkpoint(self.directory, iteration)
            _warn(f"error: {path}: training has {state}, but this last checkpoint is not evaluated")
            return 1
        said = "training finished" if state == "finished" else "training was stopped"
        more = "" if state == "finished" else "; when it continues, so does this command"
        print(f"{said} after iteration {iteration}{more}", flush=True)
        return 0

    def _lost(self, status: dict[str, Any]) -> str:
        pid, host = status["process"]["pid"], status["process"]["host"]
        return (
            f"{self.directory}: training was lost after iteration {status['iteration']}: process "
            f"{pid} of {host} is gone, without a word; the same command continues it"
        )

    def _silence(self, status: dict[str, Any] | None) -> str:
        if status is not None and status["state"] == "lost":
            return f"{self._lost(status)}; nothing has changed"
        if not self.directory.exists():
            return f"{self.directory}: no such run directory"
        return f"{self.directory}: training has not ended, but nothing has changed"


def _named(iterations: list[int]) -> str:
    """Name iterations, at most four of them."""
    if len(iterations) == 1:
        return f"iteration {iterations[0]}"
    if len(iterations) <= 4:
        return f"iterations {', '.join(map(str, iterations))}"
    first, second, *_, last = iterations
    return f"iterations {first}, {second}, … {last} ({len(iterations)} checkpoints)"


def _stamp(path: str | Path) -> Stamp | None:
    """Return what differs when a file was changed or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _stamps(directory: Path) -> dict[str, Stamp | None]:
    """Return the stamps of all that a training changes (an evaluator's own rows are not)."""
    paths = [directory / name for name in ("config.yaml", "metrics.jsonl", "status.json")]
    with contextlib.suppress(OSError):
        # Half-written files too: a large checkpoint on a slow disk is a sign of life.
        paths += (directory / "checkpoints").iterdir()
    return {str(path): _stamp(path) for path in paths}


class _Signalled(BaseException):
    """SIGINT or SIGTERM came."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, signal.Signals(number).name


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise `_Signalled` at once, wherever the main thread is.

    A row is appended with a single write: it is there or not, whenever a signal comes.
    """
    # What a shell lets a background job ignore stays ignored.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    handlers = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)  # a second one ends the process where it is
        raise _Signalled(number)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
