"""A worker: takes a trial, runs its command to the end, and takes the next."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from launch.sweeping.command import command_of
from launch.sweeping.early import should_end
from launch.sweeping.file import Point
from launch.sweeping.metrics import history, metric_of
from launch.sweeping.shared import BEAT, Presence
from launch.sweeping.sweep import (
    FAILED,
    FINISHED,
    OVER,
    STOPPED,
    WAITING,
    Sweep,
    Trial,
    counts,
    latest,
)
from maml.errors import UserError
from maml.processes.signals import heeded, leave_lost_terminal
from maml.run import directory

T = TypeVar("T")

LOOK = 0.2
"""Seconds between two looks at a running trial."""
NEWS = 60.0
"""Seconds between two lines about a trial that runs."""
PATIENCE = 60.0
"""Seconds that a trial may take to save what it has done, once it is told to stop."""
HOPELESS = 3
"""So many trials that fail before any has succeeded end the sweep: all would."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Workers:
    """The workers of one process: threads, each of which runs one trial at a time.

    Attributes:
        failures: Trials that failed here.
    """

    def __init__(
        self, sweep: Sweep, presence: Presence, total: int | None, say: Callable[[str], None]
    ) -> None:
        self._sweep, self._presence, self._total, self._say = sweep, presence, total, say
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._began, self._done = time.monotonic(), 0
        self.failures = 0

    def run(self, workers: int) -> str | None:
        """Run until there is nothing left to take; return the name of the signal that ended it.

        Each worker has a share of the cores and of the GPUs that this process may use.

        Raises:
            UserError: of a worker: a folder that cannot be written, say.
        """
        signalled: list[str] = []

        def handle(number: int, frame: object) -> None:
            leave_lost_terminal()
            signalled.append(signal.Signals(number).name)
            self._stop.set()

        before = {n: signal.signal(n, handle) for n in heeded()}
        shares = _shares(workers)
        threads = [threading.Thread(target=self._work, args=(share,)) for share in shares]
        try:
            for thread in threads:
                thread.start()
            last = time.monotonic()
            while any(thread.is_alive() for thread in threads):
                time.sleep(LOOK)
                if time.monotonic() - last > BEAT:
                    last = time.monotonic()
                    self._presence.beat()
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._error is not None:
            raise self._error
        return signalled[0] if signalled else None

    def _work(self, share: Share) -> None:
        try:
            while not self._stop.is_set():
                trial = self._sweep.take(self._presence, self._total)
                if trial is None:
                    if not self._sweep.is_undecided():
                        return
                    self._stop.wait(1.0)
                elif not self._do(trial, share):
                    return
        except BaseException as error:
            self._error = error
            self._stop.set()

    def _do(self, trial: Trial, share: Share) -> bool:
        """Run a trial to its end, and record it; return whether to take another one."""
        shown = f"trial {trial.number} ({shown_point(self._sweep, trial.point)})"
        if not _is_done(trial.run_dir):
            again = " goes on" if trial.run_dir.is_dir() else ""
            self._say(f"{shown}{again}: {trial.run_dir}")
            state, reason = self._train(trial, share, shown)
        else:
            state, reason = FINISHED, ""  # its worker was killed before it could say so
        value = None
        if state in (FINISHED, STOPPED):
            found = metric_of(trial.run_dir, self._sweep.file.metric)
            value = None if found is None else found[1]
            if found is not None and not math.isfinite(found[1]):
                state, reason, value = FAILED, f"its {found[0].name} is {found[1]} at the end", None
            if found is None and self._sweep.file.metric is not None:
                state, reason = FAILED, f"no {self._sweep.file.metric.name} in metrics.jsonl"
        if not self._sweep.end(self._presence, trial, state, value, reason):
            self._say(f"{shown}: another worker has it now")
            return True
        if state == WAITING:
            self._say(f"{shown}: {reason}; it waits to be continued")
            return False
        self._tell(trial, shown, state, value, reason)
        if state == FAILED:
            self.failures += 1
            over = [each.state for each in self._sweep.trials() if each.state in OVER]
            if len(over) >= HOPELESS and set(over) == {FAILED}:
                raise UserError(
                    f"{self._sweep.file.path}: all {len(over)} trials so far have failed, so no "
                    f"more are begun; the last: {reason}; see {trial.log}; --retry tries them again"
                )
        return True

    def _tell(self, trial: Trial, shown: str, state: str, value: float | None, reason: str) -> None:
        over = sum(each.state in OVER for each in latest(self._sweep.trials()))
        wanted = self._sweep.wanted(self._total)
        line = f"{shown}: {state}"
        if reason:
            line += f": {reason} (log {trial.log})"
        if value is not None:
            metric = metric_of(trial.run_dir, self._sweep.file.metric)
            line += f", {metric[0].name if metric else 'metric'} {value:.4g}"
        self._done += 1
        line += f"; {over} of {wanted} trials over" if wanted is not None else f"; {over} over"
        if wanted is not None and over < wanted:
            left = (time.monotonic() - self._began) / self._done * (wanted - over)
            line += f", about {_duration(left)} left"
        self._say(line)

    def _train(self, trial: Trial, share: Share, shown: str) -> tuple[str, str]:
        """Run a trial's command; return the state that it ends in, and why."""
        command = command_of(self._sweep.file, trial.point, trial.run_dir)
        environment = {"WANDB_RUN_GROUP": self._sweep.name, **os.environ} | share.environment
        before = _written(trial.run_dir / "status.json")
        try:
            with open(trial.log, "ab") as log:
                log.write(f"{time.strftime('%F %T')} {' '.join(command)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                    preexec_fn=lambda: _settle(share.cores),
                )  # fmt: skip
        except OSError as error:
            return FAILED, f"{command[0]}: {error.strerror}"
        try:
            return self._look_after(process, trial, shown, before)
        finally:
            if process.poll() is None:
                _kill(process)

    def _look_after(
        self, process: subprocess.Popen[bytes], trial: Trial, shown: str, before: int
    ) -> tuple[str, str]:
        """Wait for the end of a trial's process; end it when it is time to.

        ``before``: when its status.json was written before this start (`_written`). What an earlier
        start has left there says nothing of how this one ended.
        """
        asked, since, why = False, time.monotonic(), ""
        told, checked, size = time.monotonic(), time.monotonic(), -1
        while process.poll() is None:
            if not why and self._stop.is_set():
                why = WAITING
            grown = _size(trial.run_dir / "metrics.jsonl")
            if not why and grown != size:
                size = grown
                why = STOPPED if self._does_badly(trial) else ""
            if time.monotonic() - checked > BEAT:
                checked = time.monotonic()
                if not self._sweep.is_held_by(self._presence, trial):
                    _kill(process)
                    return WAITING, "another worker has it now"
            if why and not asked:
                asked, since = True, time.monotonic()
                process.send_signal(signal.SIGTERM)
            if asked and time.monotonic() - since > PATIENCE:
                _kill(process)
            if time.monotonic() - told > NEWS:
                told = time.monotonic()
                status = directory.read_status(trial.run_dir)
                if status is not None:
                    self._say(f"{shown}: after iteration {status['iteration']}")
            time.sleep(LOOK)
        code = process.wait()
        status = directory.read_status(trial.run_dir)
        if code == 0 or _is_done(trial.run_dir):
            return FINISHED, ""
        if why:
            return why, "stopped" if why == WAITING else ""
        anew = _written(trial.run_dir / "status.json") != before
        if anew and status is not None and status["state"] == "stopped":
            self._stop.set()  # a scheduler ends all processes of a job, this one included
            return WAITING, "it was told to stop"
        return FAILED, _reason(code, trial.log)

    def _does_badly(self, trial: Trial) -> bool:
        file = self._sweep.file
        if file.early is None or file.metric is None:
            return False
        values = history(trial.run_dir, file.metric.name)
        worst = -file.metric.sign * math.inf

        def finite(value: float) -> float:
            return value if math.isfinite(value) else worst

        known = self._sweep.trial(trial.number).values
        for band in file.early.bands:
            if band <= len(values) and band not in known:
                self._sweep.at_band(trial, band, finite(values[band - 1]))
        at: dict[int, list[float]] = {}
        for each in self._sweep.trials():
            for band, value in each.values.items():
                at.setdefault(band, []).append(-file.metric.sign * value)
        own = [-file.metric.sign * value for value in map(finite, values)]
        return should_end(file.early, own, dict(at))


def shown_point(sweep: Sweep, point: Point) -> str:
    """Return a point in a line, without what all trials have in common."""
    names = sweep.file.varied or tuple(point)
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value := point[name], float) else f"{name}={value}"
        for name in names
    )


def progress(sweep: Sweep, total: int | None) -> str:
    """Return the trials so far in a line."""
    trials = sweep.trials()
    wanted = sweep.wanted(total)
    parts = [f"{n} {state}" for state, n in counts(latest(trials)).items()]
    if wanted is not None:
        parts.append(f"{sweep.to_come(wanted, trials)} to come")
    return ", ".join(parts) or "nothing run yet"


def _is_done(run_dir: Path) -> bool:
    status = directory.read_status(run_dir)
    finished = status is not None and status["state"] == "finished"
    return finished and (run_dir / "result.json").is_file()


def _settle(cores: list[int]) -> None:
    """In a trial's process, before its program: end with the worker, and keep to its cores."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if cores:
        with contextlib.suppress(OSError):  # they may have been taken away meanwhile
            os.sched_setaffinity(0, cores)


class Share(NamedTuple):
    """What of a machine the trials of one worker have.

    Attributes:
        cores: Those that they may use; none: as this process.
        environment: What of their environment is otherwise: which GPUs they see.
    """

    cores: list[int]
    environment: dict[str, str]


def _shares(workers: int) -> list[Share]:
    """Return the share of each worker."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(torch.cuda.device_count())] if seen is None else seen.split(",")
    shared: list[dict[str, str]] = [{}] * workers
    if workers > 1 and len(gpus) > 1:
        shared = [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in _divided(gpus, workers)]
    return [Share(*both) for both in zip(_core_shares(workers), shared, strict=True)]


def _core_shares(workers: int) -> list[list[int]]:
    """Return for each worker the cores of its trials; none, where that cannot be said.

    A program that counts its cores, as ours and torchrun's processes do, then takes no more threads
    than its share. Where there are fewer cores than workers, each has one.
    """
    if workers == 1 or not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(workers)]
    return _divided(sorted(os.sched_getaffinity(0)), workers)


def _divided(all_: list[T], workers: int) -> list[list[T]]:
    """Return a part for each worker, all of one size; where there are fewer, one alone."""
    each = max(1, len(all_) // workers)
    starts = [i * each % len(all_) for i in range(workers)]
    return [all_[start : start + each] for start in starts]


def _written(path: Path) -> int:
    """Return when a file was written last; -1: it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    process.wait()


def _reason(code: int, log: Path) -> str:
    """Say why a program ended badly: its own line about it, as far as it has one."""
    with open(log, "rb") as file:
        file.seek(max(0, _size(log) - 20_000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    ours = [line for line in lines if line.startswith("error: ")]
    said = [line for line in (ours or lines) if line]
    how = f"exit code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (was there too little memory?)"
    return f"{how}: {said[-1].removeprefix('error: ')}" if said and (ours or code > 0) else how


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
