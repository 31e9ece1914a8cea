"""W&B's distributions of a sweep's parameter, each as one of Optuna's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    # That log(1/X) is uniform says the same of log X.
    "inv_log_uniform": lambda min, max: _between(math.exp(-max), math.exp(-min), log=True),
    "inv_log_uniform_values": lambda min, max: _between(min, max, log=True),
}
"""The table: from what the file says of a parameter, what Optuna draws from."""


class Parameter(NamedTuple):
    """One parameter of a sweep.

    Attributes:
        name: As the file spells it; a flag of the program.
        kind: Which of `KINDS`.
        space: What Optuna draws from.
    """

    name: str
    kind: str
    space: BaseDistribution

    @property
    def values(self) -> Sequence[Any] | None:
        """All values that it may have, in order; None where there is no end of them."""
        if isinstance(self.space, CategoricalDistribution):
            return self.space.choices
        if isinstance(self.space, IntDistribution):
            return range(self.space.low, self.space.high + 1, self.space.step)
        return None


def same(value: Any) -> str:
    """Return what equal values have in common: 1 and 1.0 are one value, 1 and True are two."""
    whole = isinstance(value, float) and value.is_integer()
    return repr(int(value) if whole else value)


def read_parameter(name: str, said: Any) -> Parameter:
    """Return the parameter that a file describes.

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
        return Parameter(name, kind, KINDS[kind](**facts))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"parameters: {name}: {error}") from error


def _usual(said: dict[str, Any]) -> str:
    """Return the distribution that is meant where none is named, as W&B reads it."""
    for key, kind in (("value", "constant"), ("values", "categorical")):
        if key in said:
            return kind
    return "int_uniform" if all(type(said.get(k)) is int for k in ("min", "max")) else "uniform"
