"""Which point comes next: a function of the file and of what was run, of nothing else."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from launch.sweeping.file import Point, SweepFile
from launch.sweeping.parameters import Parameter, same

TRIES = 1000
"""Draws of a random point before those that are left are listed, where they can be."""
LISTED = 1_000_000
"""The most points that are listed."""


class Chosen(NamedTuple):
    """A point, and where it lies: the quantile of each parameter, for Bayesian search."""

    point: Point
    quantiles: dict[str, float]


class Past(NamedTuple):
    """A trial, as far as the choice of the next one depends on it.

    Attributes:
        chosen: Its point.
        value: Its metric; None while it runs, and where it has none.
        runs: Whether it may still have one.
    """

    chosen: Chosen
    value: float | None
    runs: bool


def key(point: Point) -> tuple[tuple[str, str], ...]:
    """Return what equal points have in common."""
    return tuple((name, same(point[name])) for name in sorted(point))


def next_point(file: SweepFile, past: Sequence[Past], identity: str) -> Chosen | None:
    """Return the next point; None where all were chosen.

    Args:
        file: The sweep.
        past: All trials so far.
        identity: The sweep's own name: another sweep of the same file draws other points.
    """
    seen = {key(trial.chosen.point) for trial in past}
    if file.method == "grid":
        points = (Chosen(point, {}) for point in file.grid())
        return next((each for each in points if key(each.point) not in seen), None)
    if file.size is not None and len(seen) >= file.size:
        return None
    generator = random.Random(f"{identity} {len(past)}")
    if file.method == "bayes":
        for _ in range(10):
            chosen = _suggested(file, past, generator.getrandbits(32))
            if key(chosen.point) not in seen:
                return chosen
    for _ in range(TRIES):
        quantiles = {p.name: generator.random() or 0.5 for p in file.parameters}
        chosen = Chosen({p.name: p.at(quantiles[p.name]) for p in file.parameters}, quantiles)
        if key(chosen.point) not in seen:
            return chosen
    left = []
    if file.size is not None and file.size <= LISTED:
        left = [point for point in _all(file.parameters) if key(point) not in seen]
    if not left:
        return None
    point = generator.choice(left)
    return Chosen(point, {p.name: _quantile(p, point) for p in file.parameters})


def _all(parameters: Sequence[Parameter]) -> list[Point]:
    points: list[Point] = [{}]
    for parameter in parameters:
        values = parameter.values or []
        points = [{**point, parameter.name: value} for point in points for value in values]
    return points


def _quantile(parameter: Parameter, point: Point) -> float:
    """Return a quantile at which a parameter of finitely many values has the point's."""
    values = [same(value) for value in parameter.values or []]
    return (values.index(same(point[parameter.name])) + 0.5) / len(values)


def _suggested(file: SweepFile, past: Sequence[Past], seed: int) -> Chosen:
    """Ask Optuna's TPE (Bergstra et al. 2011), over quantiles and choices.

    Its study is made anew each time, from what all workers have done.
    """
    assert file.metric is not None
    varied = [p for p in file.parameters if p.name in file.varied]
    space = {p.name: _space(p) for p in varied}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Where others still run, to come near them is as if it were known to be bad.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    direction = optuna.study.StudyDirection[file.metric.goal.upper()]
    study = optuna.create_study(direction=direction, sampler=sampler)
    for trial in past:
        if trial.value is None and not trial.runs:
            continue
        study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.RUNNING if trial.value is None else TrialState.COMPLETE,
                value=trial.value,
                params={p.name: _place(p, trial.chosen) for p in varied},
                distributions=space,
            )
        )  # fmt: skip
    found = study.ask(space).params
    point, quantiles = {}, {}
    for parameter in file.parameters:
        place = found.get(parameter.name, 0.5)
        if isinstance(space.get(parameter.name), CategoricalDistribution):
            values = parameter.values or []
            point[parameter.name] = values[place]
            quantiles[parameter.name] = (place + 0.5) / len(values)
        else:
            point[parameter.name] = parameter.at(place)
            quantiles[parameter.name] = place
    return Chosen(point, quantiles)


def _space(parameter: Parameter) -> BaseDistribution:
    """Return where TPE looks: among choices, or along the quantiles."""
    if parameter.kind.startswith("categorical"):
        return CategoricalDistribution(range(len(parameter.values or [])))
    return FloatDistribution(1e-6, 1 - 1e-6)


def _place(parameter: Parameter, chosen: Chosen) -> float | int:
    """Return where a point lies in `_space`."""
    if parameter.kind.startswith("categorical"):
        values = [same(value) for value in parameter.values or []]
        return values.index(same(chosen.point[parameter.name]))
    quantile, value = chosen.quantiles[parameter.name], chosen.point[parameter.name]
    if not _is_at(parameter, quantile, value):
        quantile = _where(parameter, value)
    return min(max(quantile, 1e-6), 1 - 1e-6)


def _is_at(parameter: Parameter, quantile: float, value: float) -> bool:
    """Say whether a value still lies where it was drawn; the file may have other bounds now."""
    return math.isclose(parameter.at(quantile), value, rel_tol=1e-9, abs_tol=1e-12)


def _where(parameter: Parameter, value: float) -> float:
    """Return where in (0, 1) a parameter has ``value``, by halving: `Parameter.at` is monotone."""
    low, high = 1e-6, 1 - 1e-6
    grows = parameter.at(low) <= parameter.at(high)
    for _ in range(60):
        middle = (low + high) / 2
        if (parameter.at(middle) < value) == grows:
            low = middle
        else:
            high = middle
    return (low + high) / 2
