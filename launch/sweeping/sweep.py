"""A sweep's folder: its trials, their states, and who takes which.

sweep.yaml     the file, as it was when the sweep was last continued
journal.log    Optuna's journal: what is known of every trial
trials/0007/   the run directory of trial 7
logs/0007.log  what it printed
workers/       signs of life of those that work here; beside them, locks
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from launch.sweeping.choosing import Chosen, Past, key, next_point
from launch.sweeping.file import Point, SweepFile, written
from launch.sweeping.journal import Journal
from launch.sweeping.shared import GONE, UNSURE, FolderLock, Others, Presence
from maml.errors import UserError
from maml.run.files import write_text
from maml.run.lock import Lock

WAITING, RUNNING, FINISHED, STOPPED, FAILED, LOST = STATES = (
    "waiting", "running", "finished", "stopped early", "failed", "lost"
)  # fmt: skip
"""What a trial may be. Lost: its worker has ended without a word; the next one takes it up."""
OVER = (FINISHED, STOPPED, FAILED)


class Trial(NamedTuple):
    """A trial, as it is now.

    Attributes:
        number: From 0 on, in the order in which trials were begun; never used twice.
        point: The value of every parameter.
        state: One of `STATES`.
        value: The metric; None where there is none, or not yet.
        values: What it was at each band, for ending trials early.
        reason: Why it failed; "" if it did not.
        worker: Who has it, or had it last.
        run_dir: Its run directory.
        log: What it printed.
        id: Optuna's own number of it.
    """

    number: int
    point: Point
    state: str
    value: float | None
    values: dict[int, float]
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
    """

    def __init__(self, folder: Path, file: SweepFile) -> None:
        """Begin in ``folder``, or continue what is there.

        Raises:
            UserError: if it cannot be written, or what was run there is no part of ``file``.
        """
        self.folder, self.file = folder, file
        try:
            for part in ("trials", "logs", "workers", "locks"):
                (folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--folder {folder}: {error.strerror}") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._others = Others(folder / "workers")
        self._lock = FolderLock(folder / "locks" / "next")
        try:
            with self._lock.held():
                self._storage = JournalStorage(
                    Journal(folder / "journal.log", folder / "locks" / "journal")
                )
                self._open()
        except OSError as error:
            raise UserError(f"--folder {folder}: {error.strerror}") from error

    def _open(self) -> None:
        studies = self._storage.get_all_studies()
        said = json.loads(json.dumps(self.file.said))
        if not studies:
            name = f"{self.file.path.stem}-{uuid.uuid4().hex[:8]}"
            goal = self.file.metric.goal if self.file.metric else "maximize"
            directions = [StudyDirection[goal.upper()]]
            self._study, self.name = self._storage.create_new_study(directions, name), name
        else:
            self._study, self.name = studies[0]._study_id, studies[0].study_name
            before = studies[0].user_attrs.get("file")
            points = {trial.number: trial.point for trial in self._frozen()}
            misfit = self.file.misfit(before, points) if before is not None else ""
            if misfit:
                raise UserError(
                    f"{self.file.path}: not what was run in {self.folder}: {misfit}; another "
                    "--folder begins another sweep"
                )
            if before == said:
                return
        self._storage.set_study_user_attr(self._study, "file", said)
        write_text(self.folder / "sweep.yaml", written(self.file.said))

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        return [self._with_state(trial) for trial in self._frozen()]

    def trial(self, number: int) -> Trial:
        """Return one trial as it is now."""
        return self.trials()[number]

    def _with_state(self, trial: Trial) -> Trial:
        if trial.state == RUNNING and self._worker_of(trial) == GONE:
            return trial._replace(state=LOST)
        return trial

    def _worker_of(self, trial: Trial) -> str:
        return self._others.look(trial.worker) if trial.worker else GONE

    def is_undecided(self) -> bool:
        """Return whether a trial may be there to take soon: it is not known who has it.

        Its worker is gone, and its training not yet; or its worker is silent, on another machine.
        """
        return any(
            trial.state == LOST or (trial.state == RUNNING and self._worker_of(trial) == UNSURE)
            for trial in self.trials()
        )

    def _frozen(self) -> list[Trial]:
        trials = self._storage.get_all_trials(self._study, deepcopy=False)
        return [self._read(trial) for trial in trials]

    def _read(self, frozen: FrozenTrial) -> Trial:
        name, attributes = f"{frozen.number:04d}", frozen.user_attrs
        states = {
            TrialState.WAITING: WAITING, TrialState.RUNNING: RUNNING, TrialState.FAIL: FAILED,
            TrialState.COMPLETE: FINISHED, TrialState.PRUNED: STOPPED,
        }  # fmt: skip
        return Trial(
            number=frozen.number,
            point=frozen.params,
            state=states[frozen.state],
            value=frozen.values[0] if frozen.values else None,
            values=frozen.intermediate_values,
            reason=attributes.get("reason", ""),
            worker=attributes.get("worker", ""),
            run_dir=self.folder / "trials" / name,
            log=self.folder / "logs" / f"{name}.log",
            id=frozen._trial_id,
        )

    def take(self, presence: Presence, total: int | None) -> Trial | None:
        """Return a trial that is this process's from here on: lost, waiting or new.

        Args:
            presence: This process.
            total: Of how many points there are to be trials, those there are already included;
                None: as the file's run_cap says.

        Returns:
            None where there is none to take.
        """
        with self._lock.held():
            trials = self.trials()
            for trial in trials:
                # A killed worker's training may live on for a moment.
                if trial.state == LOST and Lock.is_held(trial.run_dir):
                    continue
                if trial.state in (LOST, WAITING):
                    self._storage.set_trial_user_attr(trial.id, "worker", presence.name)
                    if trial.state == WAITING:
                        self._storage.set_trial_state_values(trial.id, TrialState.RUNNING)
                    return trial._replace(state=RUNNING, worker=presence.name)
            wanted = self.wanted(total)
            if wanted is not None and not self.to_come(wanted, trials):
                return None
            chosen = next_point(self.file, [self._past(trial) for trial in trials], self.name)
            if chosen is None:
                return None
            return self._begin(chosen, presence.name, TrialState.RUNNING)

    def _begin(self, chosen: Chosen, worker: str, state: TrialState) -> Trial:
        """Record a new trial: one line of the journal, so that there is all of it or nothing."""
        record = create_trial(
            state=state,
            params=chosen.point,
            distributions={p.name: p.recorded(chosen.point[p.name]) for p in self.file.parameters},
            user_attrs={"worker": worker, "quantiles": chosen.quantiles},
        )
        id = self._storage.create_new_trial(self._study, template_trial=record)
        return self._read(self._storage.get_trial(id))

    def _past(self, trial: Trial) -> Past:
        quantiles = self._storage.get_trial(trial.id).user_attrs.get("quantiles", {})
        return Past(Chosen(trial.point, quantiles), trial.value, trial.state not in OVER)

    def retry_failed(self) -> int:
        """Let failed trials wait again, as new ones; return how many."""
        with self._lock.held():
            trials = self.trials()
            fine = {key(trial.point) for trial in trials if trial.state != FAILED}
            again = {key(t.point): t for t in trials if key(t.point) not in fine}
            for trial in again.values():
                quantiles = self._storage.get_trial(trial.id).user_attrs.get("quantiles", {})
                self._begin(Chosen(trial.point, quantiles), "", TrialState.WAITING)
            return len(again)

    def is_held_by(self, presence: Presence, trial: Trial) -> bool:
        """Return whether a trial is still ``presence``'s: one that was thought dead has lost it."""
        now = self._read(self._storage.get_trial(trial.id))
        return now.state == RUNNING and now.worker == presence.name

    def at_band(self, trial: Trial, band: int, value: float) -> None:
        """Record a running trial's metric after ``band`` of its values."""
        self._storage.set_trial_intermediate_value(trial.id, band, value)

    def end(
        self, presence: Presence, trial: Trial, state: str, value: float | None, reason: str = ""
    ) -> bool:
        """Record how a trial of ``presence`` ended; return False where it is another's by now.

        ``state`` `WAITING` gives it back: whoever comes next continues it.
        """
        states = {
            FINISHED: TrialState.COMPLETE, STOPPED: TrialState.PRUNED, FAILED: TrialState.FAIL,
            WAITING: TrialState.WAITING,
        }  # fmt: skip
        with self._lock.held():
            if not self.is_held_by(presence, trial):
                return False
            if reason:
                self._storage.set_trial_user_attr(trial.id, "reason", reason)
            values = None if value is None else [value]
            try:
                self._storage.set_trial_state_values(trial.id, states[state], values)
            except UpdateFinishedTrialError:
                return False
            return True

    def wanted(self, total: int | None) -> int | None:
        """Return of how many points there are to be trials; None where there is no end."""
        cap = self.file.run_cap if total is None else total
        known = [n for n in (cap, self.file.size) if n is not None]
        return min(known) if known else None

    def to_come(self, wanted: int, trials: list[Trial]) -> int:
        """Return how many trials are not begun yet."""
        return max(0, wanted - len({key(trial.point) for trial in trials}))


def setting_of(point: Point, names: Iterable[str]) -> str:
    """Name a setting by the values of these parameters: ``inner_lr=0.4 inner_steps=1``."""
    return " ".join(f"{name}={point[name]}" for name in names) or "the only setting"


def settings(
    file: SweepFile, trials: list[Trial], *, apart: str = "seed"
) -> dict[str, list[Trial]]:
    """Return the trials of each setting: of one point, but for the parameter ``apart``.

    Of a point that was tried again it is the last trial.
    """
    names = [name for name in file.varied if name != apart]
    found: dict[str, list[Trial]] = {}
    for trial in latest(trials):
        found.setdefault(setting_of(trial.point, names), []).append(trial)
    return found


def latest(trials: list[Trial]) -> list[Trial]:
    """Return the last trial of each point: one that was tried again counts no more."""
    return list({key(trial.point): trial for trial in trials}.values())


def counts(trials: list[Trial]) -> dict[str, int]:
    """Return how many trials there are of each state that there is."""
    found = {state: sum(trial.state == state for trial in trials) for state in STATES}
    return {state: n for state, n in found.items() if n}
