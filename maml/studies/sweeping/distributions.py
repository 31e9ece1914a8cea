"""W&B's distributions of a sweep's parameter, each as one of Optuna's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)


def _among(values: list[Any]) -> CategoricalDistribution:
    if not isinstance(values, list) or not values:
        raise ValueError("values: must be a list of at least one")
    for value in values:
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"{value!r} is no value of a flag")
    return CategoricalDistribution(list({same(value): value for value in values}.values()))


def _between(min: float, max: float, *, log: bool = False, q: float | None = None) -> Any:
    if not -math.inf < min < max < math.inf:
        raise ValueError(f"min {min} must be below max {max}")
    return FloatDistribution(min, max, log=log, step=q)


def _whole(min: Any, max: Any, q: Any = 1) -> BaseDistribution:
    if not all(type(number) is int for number in (min, max, q)) or not min < max:
        raise ValueError(f"min {min} must be below max {max}, both whole numbers")
    return IntDistribution(min, max, step=q)


def _steps(min: float, max: float, q: float = 1) -> BaseDistribution:
    whole = all(type(number) is int for number in (min, max, q))
    return _whole(min, max, q) if whole else _between(min, max, q=q)


KINDS: dict[str, Callable[..., BaseDistribution]] = {
    "constant": lambda value: _among([value]),
    "categorical": lambda values: _among(values),
    "int_uniform": lambda min, max: _whole(min, max),
    "uniform": lambda min, max: _between(min, max),
    "q_uniform": lambda min, max, q=1: _steps(min, max, q),
    "log_uniform": lambda min, max: _between(math.exp(min), math.exp(max), log=True),
    "log_uniform_values": lambda min, max: _between(min, max, log=True),
}
"""The table: from what the file says of a parameter, what Optuna draws from."""


def values_of(space: BaseDistribution) -> Sequence[Any] | None:
    """Return all values that a parameter may have, in order; None where there is no end of them."""
    if isinstance(space, CategoricalDistribution):
        return space.choices
    if isinstance(space, IntDistribution):
        return range(space.low, space.high + 1, space.step)
    return None


def same(value: Any) -> str:
    """Return what equal values have in common: 1 and 1.0 are one value, 1 and True are two."""
    whole = isinstance(value, float) and value.is_integer()
    return repr(int(value) if whole else value)


def read_parameter(name: str, said: Any) -> BaseDistribution:
    """Return what Optuna draws a parameter from that a file describes.

    Raises:
        ValueError: naming the parameter.
    """
    try:
        if not isinstance(said, dict) or not said:
            raise ValueError("must be a mapping, as in {values: [1, 2]}")
        kind = said.get("distribution", _usual(said))
        if kind not in KINDS:
            raise ValueError(f"distribution {kind!r} is not one of {', '.join(KINDS)}")
        facts = {str(key): value for key, value in said.items() if key != "distribution"}
        taken = inspect.signature(KINDS[kind])
        try:
            taken.bind(**facts)
        except TypeError:
            raise ValueError(f"{kind} has {' and '.join(taken.parameters)}") from None
        return KINDS[kind](**facts)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"parameters: {name}: {error}") from error


def _usual(said: dict[str, Any]) -> str:
    """Return the distribution that is meant where none is named, as W&B reads it."""
    for key, kind in (("value", "constant"), ("values", "categorical")):
        if key in said:
            return kind
    return "int_uniform" if all(type(said.get(k)) is int for k in ("min", "max")) else "uniform"
