"""A sweep's folder: its trials, their states, and who takes which.

sweep.yaml     the file, as it was when the sweep was last continued
journal.log    Optuna's journal: what is known of every trial
trials/0007/   the run directory of trial 7
logs/0007.log  what it printed
workers/       signs of life of those that work here
"""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import NamedTuple

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from maml.errors import UserError
from maml.run.files import make_folder, write_text
from maml.run.lock import Lock
from maml.studies.sweeping import file as files
from maml.studies.sweeping.choosing import next_point
from maml.studies.sweeping.distributions import values_of
from maml.studies.sweeping.file import SweepFile
from maml.studies.sweeping.points import Point, settings
from maml.studies.sweeping.shared import Workers, alone, journal

WAITING, RUNNING, FINISHED, STOPPED, FAILED, LOST = STATES = (
    "waiting", "running", "finished", "stopped early", "failed", "lost"
)  # fmt: skip
"""What a trial may be. Lost: its worker has ended without a word; the next one takes it up."""
OVER = (FINISHED, STOPPED, FAILED)
RECORDED = {
    TrialState.WAITING: WAITING, TrialState.RUNNING: RUNNING, TrialState.COMPLETE: FINISHED,
    TrialState.PRUNED: STOPPED,
}  # fmt: skip
"""Optuna's states. Of one that has failed nothing could change any more, not even by --retry: so a
trial that has failed waits there, with the reason."""
FIXED = ("method", "metric", "program", "command", "early_terminate")
"""What must not change in a file once trials were run."""


class Trial(NamedTuple):
    """A trial, as it is now.

    Attributes:
        number: From 0 on, in the order in which trials were begun.
        point: The value of every parameter.
        state: One of `STATES`.
        value: The metric; None where there is none, or not yet.
        reason: Why it failed; "" if it did not.
        worker: Who has it, or had it last.
        run_dir: Its run directory.
        log: What it printed.
        id: What Optuna calls it.
    """

    number: int
    point: Point
    state: str
    value: float | None
    reason: str
    worker: str
    run_dir: Path
    log: Path
    id: int


class Sweep:
    """A sweep, to be continued by this process and by others.

    Attributes:
        folder: Where it is.
        file: What it goes through.
        name: Its identity, which no other sweep has, not even of the same file.
        workers: Who works on it; whoever takes trials has joined them.
    """

    def __init__(self, folder: Path, file: SweepFile) -> None:
        """Begin in ``folder``, or continue what is there.

        Raises:
            UserError: if it cannot be written, or what was run there is no part of ``file``.
        """
        for part in ("", "trials", "logs", "workers"):
            make_folder(folder / part, "--folder")
        self.folder, self.file = folder, file
        self.workers = Workers(folder / "workers")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with alone(self.folder / "next"):
            self._storage = journal(folder / "journal.log")
            studies = self._storage.get_all_studies()
            if studies:
                self._study, self.name = studies[0]._study_id, studies[0].study_name
                if misfit := self._misfit():
                    raise UserError(
                        f"{file.path}: not what was run in {folder}: {misfit}; another --folder "
                        "begins another sweep"
                    )
            else:
                goals = [StudyDirection[file.goal.upper()]]
                self.name = f"{file.path.stem}-{uuid.uuid4().hex[:8]}"
                self._study = self._storage.create_new_study(goals, self.name)
            write_text(folder / "sweep.yaml", file.path.read_text(encoding="utf-8"))

    def _misfit(self) -> str:
        """Say why the file is not that of this sweep; "" where it is, or it was extended."""
        if any("reason" not in record.user_attrs for record in self._records()):
            return "it was begun by an earlier version of this program"
        before = self.folder / "sweep.yaml"
        said = files.read(before).said if before.exists() else self.file.said
        for name in FIXED:
            if said.get(name) != self.file.said.get(name):
                return f"{name} was {said.get(name)!r}, and is {self.file.said.get(name)!r} now"
        if other := said["parameters"].keys() ^ self.file.said["parameters"].keys():
            return f"parameters: {min(other)} is not in both"
        for name, space in self.file.space.items():
            values = values_of(space)
            for record in self._records():
                if values is not None and (value := record.params[name]) not in values:
                    return f"parameters: {name} was {value!r} in trial {record.number}"
        return ""

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        return [self._read(record) for record in self._records()]

    def _records(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study, deepcopy=False)

    def _read(self, record: FrozenTrial) -> Trial:
        name, said = f"{record.number:04d}", record.user_attrs
        state = RECORDED[record.state]
        if state == WAITING and said["reason"]:
            state = FAILED
        if state == RUNNING and self.workers.is_gone(said["worker"]):
            state = LOST
        return Trial(
            number=record.number,
            point=record.params,
            state=state,
            value=record.values[0] if record.values else None,
            reason=said["reason"],
            worker=said["worker"],
            run_dir=self.folder / "trials" / name,
            log=self.folder / "logs" / f"{name}.log",
            id=record._trial_id,
        )

    def take(self, total: int | None) -> Trial | None:
        """Return a trial that is this process's from here on: lost, waiting or new.

        Args:
            total: How many trials there are to be, those there are already included; None: as the
                file's run_cap says.

        Returns:
            None where there is none to take.
        """
        own = self.workers.own
        with alone(self.folder / "next"):
            trials = self.trials()
            for trial in trials:
                # A killed worker's training may live on for a moment.
                lost = trial.state == LOST and not Lock.is_held(trial.run_dir)
                if lost or trial.state == WAITING:
                    self._storage.set_trial_user_attr(trial.id, "worker", own)
                    if trial.state == WAITING:
                        self._storage.set_trial_state_values(trial.id, TrialState.RUNNING)
                    return trial._replace(state=RUNNING, worker=own)
            if self.to_come(total, trials) == 0:
                return None
            point = next_point(self.file, self._records(), self.name)
            if point is None:
                return None
            # One line of the journal, so that there is all of it or nothing.
            record = create_trial(
                state=TrialState.RUNNING, params=point, distributions=self.file.space,
                user_attrs={"worker": own, "reason": ""},
            )  # fmt: skip
            id = self._storage.create_new_trial(self._study, record)
            return self._read(self._storage.get_trial(id))

    def is_undecided(self) -> bool:
        """Return whether a trial may be there to take soon: it is not known who has it.

        Its worker is gone, and its training not yet; or its worker is silent, on another machine.
        """
        return any(
            trial.state == LOST
            or (trial.state == RUNNING and self.workers.is_gone(trial.worker) is None)
            for trial in self.trials()
        )

    def does_badly(self, trial: Trial, values: list[float]) -> bool:
        """Record a running trial's metric so far; return whether the trial is to be ended early."""
        study = optuna.load_study(study_name=self.name, storage=self._storage)
        worst = -math.inf if self.file.goal == "maximize" else math.inf
        known = len(self._storage.get_trial(trial.id).intermediate_values)
        for step, value in enumerate(values[known:], known + 1):
            value = value if math.isfinite(value) else worst
            self._storage.set_trial_intermediate_value(trial.id, step, value)
            if self.file.pruner.prune(study, self._storage.get_trial(trial.id)):
                return True
        return False

    def end(self, trial: Trial, state: str, value: float | None = None, reason: str = "") -> bool:
        """Record how a trial of this process ended; return False where it is another's by now.

        ``state`` `WAITING` gives it back: whoever comes next continues it.
        """
        recorded = {FAILED: TrialState.WAITING} | {name: of for of, name in RECORDED.items()}
        with alone(self.folder / "next"):
            now = self._storage.get_trial(trial.id)
            if now.state != TrialState.RUNNING or now.user_attrs["worker"] != self.workers.own:
                return False  # this process was thought dead
            if state == FAILED:
                self._storage.set_trial_user_attr(trial.id, "reason", reason)
            values = None if value is None else [value]
            self._storage.set_trial_state_values(trial.id, recorded[state], values)
            return True

    def retry_failed(self) -> int:
        """Let failed trials wait to be continued; return how many."""
        with alone(self.folder / "next"):
            failed = [trial for trial in self.trials() if trial.state == FAILED]
            for trial in failed:
                self._storage.set_trial_user_attr(trial.id, "reason", "")
            return len(failed)

    def to_come(self, total: int | None, trials: list[Trial]) -> int | None:
        """Return how many trials are not begun yet; None where there is no end of them."""
        cap = self.file.run_cap if total is None else total
        known = [n for n in (cap, self.file.size) if n is not None]
        return max(0, min(known) - len(trials)) if known else None

    def settings(self, trials: list[Trial]) -> dict[str, list[Trial]]:
        """Return the trials of each setting, as `points.settings`."""
        return settings(self.file.varied, ((trial.point, trial) for trial in trials))

    def progress(self, total: int | None) -> str:
        """Return the trials so far in a line."""
        trials = self.trials()
        parts = [f"{n} {state}" for state, n in counts(trials).items()]
        if (left := self.to_come(total, trials)) is not None:
            parts.append(f"{left} to come")
        return ", ".join(parts) or "nothing run yet"


def kept(folder: Path) -> Sweep:
    """Return the sweep in a folder.

    Raises:
        UserError: if it is damaged.
    """
    return Sweep(folder, files.read(folder / "sweep.yaml"))


def counts(trials: list[Trial]) -> dict[str, int]:
    """Return how many trials there are of each state that there is."""
    found = {state: sum(trial.state == state for trial in trials) for state in STATES}
    return {state: n for state, n in found.items() if n}
