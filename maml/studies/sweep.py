"""``python -m launch.sweep FILE``: run the trials of a sweep, without a server.

    python -m launch.sweep launch/sweeps/inner-rate.yaml --workers 2 --report
    python -m launch.sweep launch/sweeps/inner-rate.yaml --total 20     # 20 in all, not 20 more

The file has W&B's format, so ``wandb sweep FILE`` takes it unchanged. Its trials are in
``runs/sweeps/<name of the file>``. The same command continues a sweep that was stopped or killed.
Other hosts that share the folder can run the command at the same time: they share the trials.
"""

import contextlib
import math
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from maml.config.parser import Parser, add_trust, at_least
from maml.errors import UserError
from maml.evaluation.best import best
from maml.processes.signals import SIGNALS, StopRequest, exit_code, name_of
from maml.processes.streams import log_in
from maml.run import directory
from maml.run.files import read_rows
from maml.run.reading import history
from maml.studies.sweeping import command, file
from maml.studies.sweeping.file import setting_of
from maml.studies.sweeping.sweep import FAILED, FINISHED, RUNNING, WAITING, Sweep, Trial

T = TypeVar("T")
LOOK = 0.2
"""Seconds between two looks at a running trial."""
PATIENCE = 60.0
"""Seconds that a trial has to save its work after a stop signal."""
STOPS = [code for number in SIGNALS for code in (-number, 128 + number)]
"""Exit codes of a program that was told to stop."""
say = partial(print, flush=True)


def main(arguments: list[str]) -> int:
    """Run what is left of a sweep; return the exit code."""
    parser = Parser(prog="python -m launch.sweep", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path)
    text = "trials at a time, which share the cores; 0: only tell how far it is (default: 1)"
    parser.add_argument("--workers", type=at_least(0), default=1, help=text)
    text = "trials in all, with those that were run (default: the file's run_cap, or all there are)"
    parser.add_argument("--total", type=at_least(1), help=text)
    text = "at the end write report.md, with figures"
    parser.add_argument("--report", action="store_true", help=text)
    parser.add_argument("--retry", action="store_true", help="let trials that have failed go on")
    text = "where the sweep is (default: runs/sweeps/<name of FILE>)"
    parser.add_argument("--folder", type=Path, help=text)
    add_trust(parser, "FILE")
    options = parser.parse_args(arguments)
    described = file.read(options.file, trust=options.trust)
    if "early_terminate" in described.said:
        say("early_terminate: left out; each trial runs to its end")
    folder = options.folder or Path("runs", "sweeps", options.file.stem)
    if options.workers:  # without workers, no trial runs
        command.check(described)
        if described.size is None and not (options.total or described.said.get("run_cap")):
            raise UserError(f"--total: {options.file} has infinitely many values")
    elif not folder.is_dir():
        raise UserError(f"--workers 0: nothing was run in {folder}")
    sweep = Sweep(folder, described)
    log_in(folder)
    _tell(sweep, options.total)
    if options.retry:
        say(f"{sweep.retry_failed()} failed trials wait again")
    stop = StopRequest()
    code = _work(sweep, options.workers, options.total, stop) if options.workers else 0
    if options.report and code in (0, 1) and not stop:
        # Imported late, because only a report draws.
        from maml.studies.sweeping.report import write

        say(f"report {write(sweep)}")
    if stop.signal is not None:
        say(f"stopped by {stop.signal}; the same command continues")
        return exit_code(stop.signal)
    return code


def _work(sweep: Sweep, workers: int, total: int | None, stop: StopRequest) -> int:
    stop.install()
    Workers(sweep, total, stop).run(workers)
    _tell(sweep, total)
    states = {trial.state for trial in sweep.trials()}
    if RUNNING in states:
        say("other processes run the rest")
    elif WAITING in states and not stop:
        say("a trial was told to stop; the same command continues")
        return 143
    return 1 if FAILED in states else 0


def _tell(sweep: Sweep, total: int | None) -> None:
    say(f"sweep {sweep.study.study_name} in {sweep.folder}: {sweep.progress(total)}")


def share(whole: list[T], worker: int, workers: int) -> list[T]:
    """Return a worker's part of the cores or GPUs; if there are too few, workers share one."""
    return whole[worker::workers] or whole[worker % max(1, len(whole)) :][:1]


class Workers:
    """The workers of one process; each runs one trial at a time.

    The main thread starts and ends all trials. Linux may hand a signal to any thread, but Python
    handles it in the main thread. So the main thread must not wait for others: it would sleep on.
    """

    def __init__(self, sweep: Sweep, total: int | None, stop: StopRequest) -> None:
        self._sweep, self._total, self._stop = sweep, total, stop
        self._ending = False
        self._running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}

    @property
    def _over(self) -> bool:
        return bool(self._stop) or self._ending

    def run(self, workers: int) -> None:
        """Run until no trial is left. After a stop signal start none, and stop those that run."""
        looking, running = set(range(workers)), self._running
        try:
            while not self._over and (looking or running):
                for worker, (trial, process) in [*running.items()]:
                    if process.poll() is not None:
                        del running[worker]
                        self._end(trial, *_ended(process.returncode, trial))
                for worker in looking - running.keys():
                    taken = None if self._over else self._sweep.take(self._total)
                    if taken is not None:
                        self._start(taken, worker, workers)
                    elif all(each.state != WAITING for each in self._sweep.trials()):
                        looking.remove(worker)
                time.sleep(LOOK)
        finally:
            for _, process in running.values():
                process.send_signal(signal.SIGTERM)
            until = time.monotonic() + PATIENCE
            for trial, process in running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                self._end(trial, FINISHED if process.wait() == 0 else WAITING)

    def _start(self, trial: Trial, worker: int, workers: int) -> None:
        """Start a trial's command, unless a stop signal came while the trial was taken."""
        status = directory.read_status(trial.run_dir)
        # The trial may be finished already, if its worker was killed before it recorded that.
        finished = status is not None and status["state"] == "finished"
        if finished or self._over:
            self._end(trial, FINISHED if finished else WAITING)
            return
        again = " goes on" if trial.run_dir.is_dir() else ""
        say(f"{self._shown(trial)}{again}: {trial.run_dir}")
        words = command.command_of(self._sweep.file, trial.record.params, trial.run_dir)
        environment = {"WANDB_RUN_GROUP": self._sweep.study.study_name, **os.environ}
        cores = sorted(os.sched_getaffinity(0))
        if workers > 1:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            count = torch.cuda.device_count() if seen is None else 0
            gpus = [*map(str, range(count))] if seen is None else seen.split(",")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share(gpus, worker, workers))
            cores = share(cores, worker, workers)
        try:
            with open(trial.log, "ab") as log:
                log.write(f"{time.strftime('%F %T')} {' '.join(words)}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True, preexec_fn=partial(_begin, cores),
                )  # fmt: skip
        except OSError as error:
            self._end(trial, FAILED, f"{words[0]}: {error.strerror}")
        else:
            self._running[worker] = trial, process

    def _end(self, trial: Trial, state: str, reason: str = "") -> None:
        """Record how a trial ended, and release it."""
        metric, value, shown = self._sweep.file.metric, None, self._shown(trial)
        if state == FINISHED:
            value = value_of_run(trial.run_dir, metric)
            if value is None:
                state = FAILED
                reason = f"no {metric} in metrics.jsonl (see --eval-every), so the sweep ends"
                self._ending = True  # no other trial would have it
            elif not math.isfinite(value):
                state, reason, value = FAILED, f"its {metric} is {value} at the end", None
        if state == WAITING:
            # A scheduler sends a stop signal to all processes of a job, so end this process, too.
            self._ending = True
            trial.hold.close()
            say(f"{shown}: it was told to stop; it waits to be continued")
        else:
            self._sweep.end(trial, value, reason)
            said = f": {reason} (log {trial.log})" if reason else f", {metric} {value:.4g}"
            say(f"{shown}: {state}{said}; {self._sweep.progress(self._total)}")

    def _shown(self, trial: Trial) -> str:
        setting = setting_of(trial.record.params, self._sweep.file.varied)
        return f"trial {trial.record.number} ({setting})"


def _begin(cores: list[int]) -> None:
    """In a trial's process: take its cores, and stop when the sweep ends; only Linux can do so."""
    os.sched_setaffinity(0, cores)
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]


def _ended(code: int, trial: Trial) -> tuple[str, str]:
    """Return a trial's state after its program's exit code, and why it failed."""
    if code == 0:
        return FINISHED, ""
    return (WAITING, "") if code in STOPS else (FAILED, _reason(code, trial.log))


def value_of_run(run_dir: Path, metric: str) -> float | None:
    """Return the value that ranks a run: the last, or the tested model's; None without values."""
    values = history(read_rows(run_dir / "metrics.jsonl"), metric)
    if metric.startswith("validation/"):
        # A program that is not ours may write no config.yaml, or another one.
        with contextlib.suppress(UserError):
            config = directory.read_config(run_dir)
            if config.test_model == "best":
                chosen = best(run_dir, values, transductive=config.transductive)
                values = {chosen[0]: values[chosen[0]]} if chosen else values
    return next(reversed(values.values()), None)


def _reason(code: int, log: Path) -> str:
    """Return why a program failed: the signal, or else its last error line or last line."""
    if code < 0:
        return f"killed by {name_of(-code)}" + " (out of memory?)" * (code == -9)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")] or lines
    return f"exit code {code}: {said[-1].removeprefix('error: ')}"
