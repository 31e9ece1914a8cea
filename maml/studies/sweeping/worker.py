"""A worker: takes a trial, runs its command to the end, and takes the next."""

import contextlib
import math
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from maml.errors import UserError
from maml.evaluation.best import best
from maml.processes.signals import SIGNALS, StopRequest, name_of
from maml.run import directory
from maml.run.files import read_rows
from maml.run.reading import history
from maml.studies.sweeping.command import command_of
from maml.studies.sweeping.file import setting_of
from maml.studies.sweeping.sweep import FAILED, FINISHED, WAITING, Sweep, Trial

T = TypeVar("T")
LOOK = 0.2
"""Seconds between two looks at a running trial."""
PATIENCE = 60.0
"""Seconds that a trial has to save its work after a stop signal."""
STOPS = [code for number in SIGNALS for code in (-number, 128 + number)]
"""Exit codes of a program that was told to stop."""
say = partial(print, flush=True)
_end_with_the_parent = torch.multiprocessing._prctl_pr_set_pdeathsig  # type: ignore[attr-defined]


def share(whole: list[T], worker: int, workers: int) -> list[T]:
    """Return a worker's part of the cores or GPUs; if there are too few, workers share one."""
    return whole[worker::workers] or whole[worker % max(1, len(whole)) :][:1]


class Workers:
    """The workers of one process: threads, each of which runs one trial at a time."""

    def __init__(self, sweep: Sweep, total: int | None) -> None:
        self._sweep, self._total = sweep, total
        self._stop, self._ending = StopRequest(), False

    def run(self, workers: int) -> str | None:
        """Run until no trial is left; return the name of the signal that stopped it, or None."""
        self._stop.install()
        with ThreadPoolExecutor(workers) as pool:
            working = [pool.submit(self._work, each, workers) for each in range(workers)]
            try:
                for done in as_completed(working):
                    done.result()
            finally:
                self._ending = True
        return self._stop.signal

    def _work(self, worker: int, workers: int) -> None:
        gpus = {}
        if workers > 1:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            count = torch.cuda.device_count() if seen is None else 0
            whole = [*map(str, range(count))] if seen is None else seen.split(",")
            gpus = {"CUDA_VISIBLE_DEVICES": ",".join(share(whole, worker, workers))}
            # This thread's cores; its trials inherit them.
            os.sched_setaffinity(0, share(sorted(os.sched_getaffinity(0)), worker, workers))
        while not self._stop and not self._ending:
            trial = self._sweep.take(self._total)
            if trial is not None:
                with trial.hold:
                    self._do(trial, gpus)
            elif any(each.state == WAITING for each in self._sweep.trials()):
                time.sleep(1.0)  # the training of a killed worker ends soon
            else:
                return

    def _do(self, trial: Trial, gpus: dict[str, str]) -> None:
        """Run a trial to its end, and record it."""
        file, record = self._sweep.file, trial.record
        shown = f"trial {record.number} ({setting_of(record.params, file.varied)})"
        state, reason, value = FINISHED, "", None
        status = directory.read_status(trial.run_dir)
        # The trial may be finished already, if its worker was killed before it recorded that.
        if status is None or status["state"] != "finished":
            again = " goes on" if trial.run_dir.is_dir() else ""
            say(f"{shown}{again}: {trial.run_dir}")
            state, reason = self._train(trial, gpus)
        if state == FINISHED:
            value = value_of_run(trial.run_dir, file.metric)
            if value is None:
                state = FAILED
                reason = f"no {file.metric} in metrics.jsonl (see --eval-every), so the sweep ends"
                self._ending = True  # no other trial would have it
            elif not math.isfinite(value):
                state, reason, value = FAILED, f"its {file.metric} is {value} at the end", None
        if state == WAITING:
            # A scheduler sends a stop signal to all processes of a job, so end this process, too.
            self._ending = True
            say(f"{shown}: it was told to stop; it waits to be continued")
        else:
            self._sweep.end(trial, value, reason)
            said = f": {reason} (log {trial.log})" if reason else f", {file.metric} {value:.4g}"
            say(f"{shown}: {state}{said}; {self._sweep.progress(self._total)}")

    def _train(self, trial: Trial, gpus: dict[str, str]) -> tuple[str, str]:
        """Run a trial's command; return the state that it ends in, and why it failed."""
        command = command_of(self._sweep.file, trial.record.params, trial.run_dir)
        environment = {"WANDB_RUN_GROUP": self._sweep.study.study_name, **os.environ, **gpus}
        try:
            with open(trial.log, "ab") as log:
                log.write(f"{time.strftime('%F %T')} {' '.join(command)}\n".encode())
                log.flush()
                # The trial stops when the thread that started it ends; only Linux can do this.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                    preexec_fn=partial(_end_with_the_parent, signal.SIGTERM),
                )  # fmt: skip
        except OSError as error:
            return FAILED, f"{command[0]}: {error.strerror}"
        told = False
        try:
            while process.poll() is None and not told:
                told = bool(self._stop or self._ending)
                time.sleep(LOOK)
            if told:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
        finally:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if code == 0:
            return FINISHED, ""
        return (WAITING, "") if told or code in STOPS else (FAILED, _reason(code, trial.log))


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
