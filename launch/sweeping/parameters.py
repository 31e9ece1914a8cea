"""What a parameter of a sweep may be: W&B's distributions, and how values are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from maml.errors import UserError

Facts = Mapping[str, Any]
Draw = Callable[[Facts, float], Any]
"""From what the file says and a quantile in (0, 1), the value."""


def _among(facts: Facts, u: float) -> Any:
    values = facts["values"]
    return values[min(int(u * len(values)), len(values) - 1)]


def _weighted(facts: Facts, u: float) -> Any:
    values, total = facts["values"], 0.0
    for value, probability in zip(values, facts["probabilities"], strict=True):
        total += probability
        if u < total:
            return value
    return values[-1]


def _whole(facts: Facts, u: float) -> int:
    low, high = facts["min"], facts["max"]
    return min(low + int(u * (high - low + 1)), high)


def _uniform(facts: Facts, u: float) -> float:
    return facts["min"] + u * (facts["max"] - facts["min"])


def _exponents(facts: Facts, u: float) -> float:
    """The bounds are natural logarithms."""
    return math.exp(_uniform(facts, u))


def _log(facts: Facts, u: float) -> float:
    low, high = math.log(facts["min"]), math.log(facts["max"])
    return math.exp(_uniform({"min": low, "max": high}, u))


def _inverse_exponents(facts: Facts, u: float) -> float:
    return math.exp(-_uniform(facts, 1 - u))


def _normal(facts: Facts, u: float) -> float:
    return facts["mu"] + facts["sigma"] * NormalDist().inv_cdf(u)


def _log_normal(facts: Facts, u: float) -> float:
    return math.exp(_normal(facts, u))


def _beta(facts: Facts, u: float) -> float:
    from scipy.stats import beta

    return float(beta.ppf(u, facts["a"], facts["b"]))


def _rounded(draw: Draw) -> Draw:
    """To multiples of ``q``."""

    def rounded(facts: Facts, u: float) -> float:
        # As numpy rounds: halves to even.
        value = float(np.round(draw(facts, u) / facts["q"])) * facts["q"]
        return int(value) if isinstance(facts["q"], int) else value

    return rounded


_BOUNDS, _BELL, _SHAPES = ("min", "max"), {"mu": 0.0, "sigma": 1.0}, {"a": 1.0, "b": 1.0}
_Q = {"q": 1.0}
KINDS: dict[str, tuple[tuple[str, ...], dict[str, float], Draw]] = {
    "constant": (("value",), {}, lambda facts, u: facts["value"]),
    "categorical": (("values",), {}, _among),
    "categorical_w_probabilities": (("values", "probabilities"), {}, _weighted),
    "int_uniform": (_BOUNDS, {}, _whole),
    "uniform": (_BOUNDS, {}, _uniform),
    "q_uniform": (_BOUNDS, _Q, _rounded(_uniform)),
    "log_uniform": (_BOUNDS, {}, _exponents),
    "log_uniform_values": (_BOUNDS, {}, _log),
    "q_log_uniform": (_BOUNDS, _Q, _rounded(_exponents)),
    "q_log_uniform_values": (_BOUNDS, _Q, _rounded(_log)),
    "inv_log_uniform": (_BOUNDS, {}, _inverse_exponents),
    # That log(1/X) is uniform between log(1/max) and log(1/min) says the same of log X.
    "inv_log_uniform_values": (_BOUNDS, {}, _log),
    "normal": ((), _BELL, _normal),
    "q_normal": ((), _BELL | _Q, _rounded(_normal)),
    "log_normal": ((), _BELL, _log_normal),
    "q_log_normal": ((), _BELL | _Q, _rounded(_log_normal)),
    "beta": ((), _SHAPES, _beta),
    "q_beta": ((), _SHAPES | _Q, _rounded(_beta)),
}
"""W&B's distributions: what each needs, what it may have with its default, and how it is drawn."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a sweep.

    Attributes:
        name: As the file spells it; a flag of the program.
        kind: Which of `KINDS`.
        facts: What the file says of it, defaults filled in.
    """

    name: str
    kind: str
    facts: Facts

    @property
    def values(self) -> list[Any] | None:
        """All values that it may have, in order, each once; None where there is no end of them."""
        facts = self.facts
        match self.kind:
            case "constant":
                return [facts["value"]]
            case "categorical":
                return list({same(value): value for value in facts["values"]}.values())
            case "categorical_w_probabilities":
                pairs = zip(facts["values"], facts["probabilities"], strict=True)
                return list({same(value): value for value, p in pairs if p > 0}.values())
            case "int_uniform":
                return list(range(facts["min"], facts["max"] + 1))
            case _:
                return None

    @property
    def steps(self) -> list[Any] | None:
        """The values that a grid goes through; None where a grid cannot be made of it."""
        if self.kind == "q_uniform":
            # As in W&B, without the upper end.
            return np.arange(self.facts["min"], self.facts["max"], self.facts["q"]).tolist()
        return None if self.kind == "categorical_w_probabilities" else self.values

    def at(self, u: float) -> Any:
        """Return the value at quantile ``u`` in (0, 1)."""
        return KINDS[self.kind][2](self.facts, u)

    def may_be(self, value: Any) -> bool:
        """Return whether it may have ``value``, one that was drawn or listed before."""
        values = self.values
        if values is not None:
            return same(value) in map(same, values)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # Rounded to a multiple of q, a value may lie beyond what it was rounded from.
        slack = self.facts.get("q", 0.0) / 2 + 1e-9 * abs(value)
        low, high = self._bounds
        return low - slack <= value <= high + slack

    @property
    def _bounds(self) -> tuple[float, float]:
        match self.kind:
            case "normal" | "q_normal":
                return -math.inf, math.inf
            case "log_normal" | "q_log_normal":
                return 0.0, math.inf
            case "beta" | "q_beta":
                return 0.0, 1.0
            case "log_uniform" | "q_log_uniform":
                return math.exp(self.facts["min"]), math.exp(self.facts["max"])
            case "inv_log_uniform":
                return math.exp(-self.facts["max"]), math.exp(-self.facts["min"])
            case _:
                return self.facts["min"], self.facts["max"]

    def recorded(self, value: Any) -> BaseDistribution:
        """Return the distribution that Optuna's journal records beside ``value``."""
        values = self.values
        if self.kind == "int_uniform":
            return IntDistribution(self.facts["min"], self.facts["max"])
        if values is not None:
            return CategoricalDistribution(values)
        low, high = self._bounds
        if not (math.isfinite(low) and math.isfinite(high)):
            return FloatDistribution(value, value)
        return FloatDistribution(min(low, value), max(high, value))


def same(value: Any) -> str:
    """Return what equal values have in common: 1 and 1.0 are one value, 1 and True are two."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{type(value).__name__} {value!r}"


def read_parameter(where: str, name: str, said: Any) -> Parameter:
    """Return the parameter that a file describes.

    Args:
        where: The file, for messages.
        name: The parameter's name.
        said: What the file says of it.

    Raises:
        UserError: naming the file and the parameter.
    """

    def wrong(what: str) -> UserError:
        return UserError(f"{where}: parameters: {name}: {what}")

    if not isinstance(said, dict) or not said:
        raise wrong("must be a mapping, as in {values: [1, 2]}")
    if "parameters" in said:
        raise wrong("parameters inside a parameter: flags have none")
    kind = said.get("distribution", _usual(said))
    if kind not in KINDS:
        raise wrong(f"unknown distribution {kind!r}; known are {', '.join(KINDS)}")
    needed, optional, _ = KINDS[kind]
    if missing := [key for key in needed if key not in said]:
        raise wrong(f"{kind} needs {' and '.join(missing)}")
    if more := said.keys() - {"distribution", *needed, *optional}:
        raise wrong(f"{kind} has no {', '.join(sorted(map(str, more)))}")
    facts = {**optional, **{key: value for key, value in said.items() if key != "distribution"}}
    _check(kind, facts, wrong)
    return Parameter(name, kind, facts)


def _usual(said: Facts) -> str:
    """Return the distribution that is meant where none is named, as W&B reads it."""
    if "value" in said:
        return "constant"
    if "values" in said:
        return "categorical_w_probabilities" if "probabilities" in said else "categorical"
    whole = all(type(said.get(key)) is int for key in _BOUNDS)
    return "int_uniform" if whole else "uniform"


def _check(kind: str, facts: Facts, wrong: Callable[[str], UserError]) -> None:
    for value in [*facts.get("values", []), *([facts["value"]] if "value" in facts else [])]:
        if not isinstance(value, str | int | float | bool | None):
            raise wrong(f"{value!r} is no value of a flag")
    if "values" in facts and not (isinstance(facts["values"], list) and facts["values"]):
        raise wrong("values: must be a list of at least one")
    if "probabilities" in facts:
        weights = facts["probabilities"]
        if not isinstance(weights, list) or len(weights) != len(facts["values"]):
            raise wrong("probabilities: must be as many as the values")
        if not all(_number(p) and p >= 0 for p in weights) or not math.isclose(sum(weights), 1):
            raise wrong("probabilities: must be numbers of at least 0 that add up to 1")
    for key in ("min", "max", "q", "mu", "sigma", "a", "b"):
        if key in facts and not _number(facts[key]):
            raise wrong(f"{key}: {facts[key]!r} is not a finite number")
    if kind == "int_uniform" and not all(type(facts[key]) is int for key in _BOUNDS):
        raise wrong("int_uniform: min and max must be whole numbers")
    if "min" in facts and not facts["min"] < facts["max"]:
        raise wrong(f"min {facts['min']} must be below max {facts['max']}")
    if kind.endswith("log_uniform_values") and not facts["min"] > 0:
        raise wrong(f"{kind}: min must be above 0")
    for key in ("q", "sigma", "a", "b"):
        if key in facts and not facts[key] > 0:
            raise wrong(f"{key} must be above 0")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
