"""Which point comes next: a function of the file and of what was run, of nothing else."""

import contextlib
import random
import warnings
from collections.abc import Sequence

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from maml.studies.sweeping.file import Point, SweepFile

TRIES = 100
"""Draws of a point before those that are left are listed, where they can be."""


def next_point(file: SweepFile, past: Sequence[FrozenTrial], identity: str) -> Point | None:
    """Return the next point; None where all were chosen.

    A grid's points come in W&B's order. Optuna's own GridSampler shuffles them, and repeats some
    where several processes ask or values were added. ``identity``: the sweep's own name; another
    sweep of the same file draws other points.
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
    """Return a study that knows what all workers have done, and draws from the file's bounds."""
    sampler: BaseSampler = RandomSampler(seed)
    if file.method == "bayes":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # Where others still run, to come near them is as if it were known to be bad.
            sampler = TPESampler(seed=seed, constant_liar=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=file.goal, sampler=sampler)
    for trial in past:
        # One that waits would be what is asked for next. The file may have had wider bounds.
        if trial.state != TrialState.WAITING:
            with contextlib.suppress(ValueError):
                study.add_trial(
                    create_trial(
                        state=trial.state, values=trial.values, params=trial.params,
                        distributions=file.space, intermediate_values=trial.intermediate_values,
                    )
                )  # fmt: skip
    return study
