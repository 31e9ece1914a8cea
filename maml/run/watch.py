"""Follow a run's checkpoints from another process, on another machine with a shared folder too.

Nothing but the run directory connects the two: training renames finished files into place and
never looks whether anybody reads them. So there are no locks, and nothing is read half-written.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from maml.errors import UserError
from maml.run import checkpoint, directory

SETTLE = 90.0
"""Seconds in which a killed training may start again, and a shared folder show its last file."""


class Evaluator(Protocol):
    """What is done with a run's checkpoints."""

    def prepare(self) -> bool:
        """Get ready as soon as the run directory says for what; return whether it is."""

    def evaluated(self) -> set[int]:
        """Return the iterations whose evaluations are written down."""

    def evaluate(self, saved: dict[str, Any]) -> None:
        """Evaluate a checkpoint's content and write the result down."""


def watch(run_dir: Path, evaluator: Evaluator, *, poll: float, patience: float) -> int:
    """Evaluate every numbered checkpoint of a run, each once, until its training is over.

    Look every ``poll`` seconds; give up when nothing has changed for ``patience`` seconds. Return
    the exit code: 0 when training has finished, or was stopped, and its last checkpoint is
    evaluated; else 1, after a line that says why. The directory need not exist yet.
    """
    _say(f"watching {run_dir}")
    before, since = None, time.monotonic()
    done, damaged = set[int](), set[int]()
    while True:
        # The status before the checkpoints: what was saved before an end is seen after it.
        status = directory.read_status(run_dir) or {"state": "unknown", "iteration": -1}
        state, iteration = status["state"], status["iteration"]
        if evaluator.prepare():
            # Read anew each time: rows of an earlier watcher, or of another one.
            done |= evaluator.evaluated()
            if _evaluate_next(run_dir, evaluator, done, damaged):
                before = None  # there is more to see by now
                continue
        ended = state in ("finished", "stopped")
        if ended and iteration in done:
            print(f"training has {state} after iteration {iteration}", flush=True)
            return 0
        if state == "failed" or (ended and iteration in damaged):
            why = ", but its last checkpoint is damaged" if ended else ""
            _say(f"error: {run_dir}: training has {state} after iteration {iteration}{why}")
            return 1
        look = _look(run_dir)
        if look != before:
            before, since = look, time.monotonic()
        limit = patience if state in ("training", "unknown") else min(SETTLE, patience)
        if time.monotonic() - since > limit:
            why = {
                "unknown": "no training has begun",
                "training": f"training is at iteration {iteration}",
                "lost": f"training was lost after iteration {iteration}",
            }.get(state, f"training has {state}, but checkpoint {iteration} is not there")
            _say(f"error: {run_dir}: nothing has changed for {limit:g} s (--patience); {why}")
            return 1
        time.sleep(min(poll, limit))


def _evaluate_next(run_dir: Path, evaluator: Evaluator, done: set[int], damaged: set[int]) -> bool:
    """Evaluate the oldest checkpoint that is not done; return whether there was one.

    One that cannot be read is said once, and added to ``damaged``.
    """
    for iteration, path in checkpoint.numbered_checkpoints(run_dir).items():
        if iteration in done | damaged:
            continue
        try:
            saved = checkpoint.load(path)
        except UserError as error:
            # Training keeps only the newest few: one that is gone by now is not damaged.
            if path.exists():
                damaged.add(iteration)
                _say(f"{error}; left out")
            continue
        evaluator.evaluate(saved)
        return True
    return False


def _look(run_dir: Path) -> set[tuple[str, int]]:
    """Return what differs when training has changed something: half-written files count, too."""
    names = ("config.yaml", "metrics.jsonl", "status.json")
    paths = [*(run_dir / name for name in names), *(run_dir / "checkpoints").glob("*")]
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):  # not there yet, or gone
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
