"""Values of a sweep's parameters; nothing here needs Optuna."""

from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

Point = dict[str, Any]
"""A value for every parameter, by name."""


def setting_of(point: Point, names: Iterable[str]) -> str:
    """Name a setting by the values of these parameters: ``inner_lr=0.4 inner_steps=1``."""
    return " ".join(f"{name}={point[name]}" for name in names) or "the only setting"


def settings(names: Iterable[str], trials: Iterable[tuple[Point, T]]) -> dict[str, list[T]]:
    """Return what has the same values of these parameters together, its seed apart."""
    found: dict[str, list[T]] = {}
    for point, trial in trials:
        found.setdefault(setting_of(point, (n for n in names if n != "seed")), []).append(trial)
    return found
