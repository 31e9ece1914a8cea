"""A sweep's folder: its trials, their states, the workers that take them, and the next point.

sweep.yaml     a copy of the file from the sweep's latest start
journal.log    Optuna's journal: all facts about every trial
trials/0007/   the run directory of trial 7
logs/0007.log  the output of trial 7
locks/0007     the lock of the process that works on trial 7, with its signs of life
"""

import contextlib
import random
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from datasets.locks import Lock
from maml.errors import UserError
from maml.run.files import make_folder, write_text
from maml.studies.sweeping import file as files
from maml.studies.sweeping.file import Point, SweepFile

GRACE = 30.0
"""Seconds after which a silent process counts as lost; Optuna's locks use the same time."""
WAITING, RUNNING, FINISHED, FAILED = STATES = ("waiting", "running", "finished", "failed")
"""The states of a trial. Waiting: its worker was stopped or killed; the next worker takes it up."""
FIXED = ("method", "metric", "program", "command")
"""The keys of a file whose values must not change after the first trial."""
TRIES = 100
"""Random draws for a new point. If all draws are old points, take the first new grid point."""


class Trial(NamedTuple):
    """A trial, as it is now."""

    record: FrozenTrial
    """Optuna's record: number, parameters, metric and the reason for a failure."""
    state: str
    run_dir: Path
    log: Path
    hold: ExitStack
    """If `Sweep.take` returned the trial: this process holds the trial until ``hold`` is closed."""


class Sweep:
    """A sweep in ``folder`` for many processes; the name of its Optuna ``study`` is unique."""

    def __init__(self, folder: Path, file: SweepFile) -> None:
        """Begin in ``folder``, or continue the sweep there, if ``file`` equals or extends it."""
        for part in ("", "trials", "logs", "locks"):
            make_folder(folder / part, "--folder")
        self.folder, self.file = folder, file
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with _alone(self.folder / "next"):
            self._storage = _journal(folder / "journal.log")
            names = optuna.get_all_study_names(self._storage)
            self.study = optuna.create_study(
                storage=self._storage, direction=file.goal,
                study_name=names[0] if names else f"{file.path.stem}-{uuid.uuid4().hex[:8]}",
                load_if_exists=True,
            )  # fmt: skip
            if misfit := self._misfit():
                raise UserError(
                    f"{file.path}: not what was run in {folder}: {misfit}; another --folder begins "
                    "another sweep"
                )
            write_text(folder / "sweep.yaml", file.path.read_text(encoding="utf-8"))

    def _misfit(self) -> str:
        """Say why the file does not fit this sweep; "" if the file equals or extends it."""
        records = self.study.get_trials(deepcopy=False)
        if any("reason" not in record.user_attrs for record in records):
            return "it was begun by an earlier version of this program"
        before = self.folder / "sweep.yaml"
        said = files.read(before).said if before.exists() else self.file.said
        for name in FIXED:
            if said.get(name) != self.file.said.get(name):
                return f"{name} was {said.get(name)!r}, and is {self.file.said.get(name)!r} now"
        for record in records:
            if other := record.params.keys() ^ self.file.space.keys():
                return f"parameters: {min(other)} is not in both"
            for name, value in record.params.items():
                values = self.file.values[name]
                if values is not None and value not in values:
                    return f"parameters: {name} was {value!r} in trial {record.number}"
        return ""

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        return [self._read(record) for record in self.study.get_trials(deepcopy=False)]

    def _read(self, record: FrozenTrial) -> Trial:
        name, said = f"{record.number:04d}", record.user_attrs
        state = RUNNING if _is_held(self.folder / "locks" / name) else WAITING
        if record.state.is_finished():
            state = FINISHED
        elif said["reason"]:
            state = FAILED
        folders = self.folder / "trials" / name, self.folder / "logs" / f"{name}.log"
        return Trial(record, state, *folders, ExitStack())

    def _held(self, trial: Trial) -> Trial:
        """Hold a trial for this process; other processes see this while this process lives."""
        path = self.folder / "locks" / f"{trial.record.number:04d}"
        path.touch()  # the file must exist, even in a folder without locks
        trial.hold.enter_context(Lock(path).held())
        return trial._replace(state=RUNNING)

    def take(self, total: int | None) -> Trial | None:
        """Take a waiting or new trial for this process and return it; None if none is left.

        ``total`` is the number of trials in all; None means the file's run_cap.
        """
        with _alone(self.folder / "next"):
            trials = self.trials()
            for trial in trials:
                # A killed worker's training may live on for a moment.
                if trial.state == WAITING and not _is_held(trial.run_dir / ".lock"):
                    return self._held(trial)
            past = [trial.record for trial in trials]
            point = next_point(self.file, past, self.study.study_name)
            if point is None or self.to_come(total, trials) == 0:
                return None
            # One line of the journal, so that a crash leaves all of the trial or nothing.
            record = create_trial(
                state=TrialState.RUNNING, params=point, distributions=self.file.space,
                user_attrs={"reason": ""},
            )  # fmt: skip
            self.study.add_trial(record)
            return self._held(self.trials()[-1])

    def end(self, trial: Trial, value: float | None, reason: str = "") -> None:
        """Record a trial's metric, or the ``reason`` of its failure; release the trial."""
        id = trial.record._trial_id
        with trial.hold, _alone(self.folder / "next"):
            if self._storage.get_trial(id).state.is_finished():
                return  # others ended it
            # With a metric, Optuna could not change the trial any more, even with --retry.
            self._storage.set_trial_user_attr(id, "reason", reason)
            if value is not None:
                self._storage.set_trial_state_values(id, TrialState.COMPLETE, [value])

    def retry_failed(self) -> int:
        """Let failed trials wait to be continued; return how many."""
        with _alone(self.folder / "next"):
            failed = [trial for trial in self.trials() if trial.state == FAILED]
            for trial in failed:
                self._storage.set_trial_user_attr(trial.record._trial_id, "reason", "")
            return len(failed)

    def to_come(self, total: int | None, trials: list[Trial]) -> int | None:
        """Return how many trials are not begun yet; None if their number has no limit."""
        cap = self.file.said.get("run_cap") if total is None else total
        known = [n for n in (cap, self.file.size) if n is not None]
        return max(0, min(known) - len(trials)) if known else None

    def progress(self, total: int | None) -> str:
        """Return one line with the number of trials in each state."""
        trials = self.trials()
        counts = {state: sum(trial.state == state for trial in trials) for state in STATES}
        parts = [f"{n} {state}" for state, n in counts.items() if n]
        if (left := self.to_come(total, trials)) is not None:
            parts.append(f"{left} to come")
        return ", ".join(parts) or "nothing run yet"


def points_in(folder: Path) -> dict[Path, Point]:
    """Return the point of each trial in ``folder``, by run directory; write nothing there."""
    storage = _loaded(folder / "journal.log")
    return {
        folder / "trials" / f"{trial.number:04d}": trial.params
        for study in storage.get_all_studies()
        for trial in storage.get_all_trials(study._study_id)
    }


def next_point(file: SweepFile, past: Sequence[FrozenTrial], identity: str) -> Point | None:
    """Return the next point, which depends only on the arguments; None if all points were chosen.

    A grid's points come in W&B's order. Optuna's GridSampler shuffles them, and repeats some if
    several processes ask or if values were added. ``identity`` is the sweep's unique name, so that
    another sweep of the same file draws other points.
    """
    seen = [trial.params for trial in past]
    if file.method != "grid" and (file.size is None or len(seen) < file.size):
        study = _study(file, past, random.Random(f"{identity} {len(past)}").getrandbits(32))
        for _ in range(TRIES):
            point = study.ask(file.space).params
            if point not in seen:
                return point
    return None if file.size is None else next((p for p in file.grid() if p not in seen), None)


def _study(file: SweepFile, past: Sequence[FrozenTrial], seed: int) -> optuna.Study:
    """Return a study that has the trials of all workers and draws within the file's bounds."""
    sampler: BaseSampler = RandomSampler(seed)
    if file.method == "bayes":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # With constant_liar, points near running trials count as bad, so workers spread out.
            sampler = TPESampler(seed=seed, constant_liar=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=file.goal, sampler=sampler)
    for trial in past:
        with contextlib.suppress(ValueError):  # the file had wider bounds before
            study.add_trial(
                create_trial(
                    state=trial.state, values=trial.values, params=trial.params,
                    distributions=file.space,
                )
            )  # fmt: skip
    return study


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Admit one process at a time, of all that share a folder, to this context."""
    lock = JournalFileOpenLock(str(path))
    lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # this process was suspended and lost its lock
            lock.release()


def _journal(path: Path) -> JournalStorage:
    """Open Optuna's journal; drop a last line that a power cut left incomplete and thus unused."""
    with _alone(path), open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return _loaded(path)


def _loaded(path: Path) -> JournalStorage:
    """Load Optuna's journal, which does not change; a UserError says that it is damaged."""
    try:
        return JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: damaged, and not at its end: {error}; restore it, or begin a sweep in "
            "another --folder"
        ) from error


def _is_held(path: Path) -> bool:
    """Return whether a process holds a lock or, without locks, gave a sign of life in `GRACE` s."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return Lock(path).is_held()
        except OSError:
            return time.time() - path.stat().st_mtime < GRACE
    return False
