"""Read a sweep's file, in W&B's format; refuse it in one line if it cannot be run."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from datasets.whole import regular
from maml.errors import UserError
from maml.run.files import naming

METHODS = ("grid", "random", "bayes")
IGNORED = (
    "apiVersion", "kind", "controller", "description", "entity", "project", "name",
    "early_terminate",
)  # fmt: skip
"""Keys that W&B reads, but that a sweep without a server does not need."""
KNOWN = ("method", "parameters", "program", "command", "metric", "run_cap", *IGNORED)
USUAL_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]


Point = dict[str, Any]
"""A value for every parameter, by name."""


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file describes it."""

    path: Path
    said: dict[str, Any]
    """The file's content, to detect later changes."""
    method: str
    space: dict[str, BaseDistribution]
    """The distribution of each flag of the program, by name, in W&B's order."""
    values: dict[str, Sequence[Any] | None]
    """All values of each flag, in order; None if they cannot be listed."""
    metric: str
    """The metric that ranks trials: ``<split>/<metric>``, as the loggers name it."""
    goal: Literal["minimize", "maximize"]
    command: tuple[str, ...]
    """The words of the command; macros are not filled in."""
    trusted: bool
    """Whether the file may name other programs than ours, and a user's own code."""

    def grid(self) -> Iterator[Point]:
        """Yield all points, if all values are known; the last parameter changes fastest."""
        # itertools.product would keep a wide range in memory.
        for index in range(self.size or 0):
            point: Point = {}
            for name, values in reversed(self.values.items()):
                assert values is not None
                index, at = divmod(index, len(values))
                point[name] = values[at]
            yield point

    @property
    def size(self) -> int | None:
        """The number of points; None if they cannot be listed."""
        each = self.values.values()
        return None if None in each else math.prod(len(values or ()) for values in each)

    @property
    def varied(self) -> list[str]:
        """The names of the parameters that may have more than one value."""
        return [n for n, values in self.values.items() if values is None or len(values) > 1]


def _values_of(space: BaseDistribution) -> Sequence[Any] | None:
    if isinstance(space, CategoricalDistribution):
        return space.choices
    if isinstance(space, IntDistribution):
        return range(space.low, space.high + 1)
    return None


def setting_of(point: Point, names: Iterable[str]) -> str:
    """Name a setting by the values of these parameters: ``inner_lr=0.4 inner_steps=1``."""
    return " ".join(f"{name}={point[name]}" for name in names) or "the only setting"


def read(path: Path, *, trust: bool = False) -> SweepFile:
    """Read a sweep's file; a UserError names the wrong entry."""
    try:
        # Not a pipe: the file is read again when it is copied.
        with naming(path, "cannot read: {}"):
            return _read(path, yaml.safe_load(regular(path).read_text(encoding="utf-8")), trust)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{path}: {error}") from error


def _read(path: Path, said: Any, trust: bool) -> SweepFile:
    if not isinstance(said, dict) or not isinstance(said.get("parameters"), dict):
        raise ValueError("not a sweep: it needs a method and a mapping of parameters")
    if more := [str(key) for key in said if key not in KNOWN]:
        raise ValueError(f"{', '.join(more)}: not known here; known are {', '.join(KNOWN)}")
    method, run_cap = said.get("method"), said.get("run_cap", 1)
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is not one of {', '.join(METHODS)}")
    if type(run_cap) is not int or run_cap < 1:
        raise ValueError(f"run_cap: {run_cap!r} is not a whole number of at least 1")
    # Sorted, because W&B goes through a grid in this order.
    space = {name: _parameter(name, facts) for name, facts in sorted(said["parameters"].items())}
    values = {name: _values_of(each) for name, each in space.items()}
    for name, known in values.items():
        if method == "grid" and known is None:
            raise ValueError(f"parameters: {name}: a grid needs a finite number of values")
    metric, goal = _metric(said.get("metric"))
    return SweepFile(path, said, method, space, values, metric, goal, _command(said), trust)


def _metric(said: Any) -> tuple[str, Literal["minimize", "maximize"]]:
    if not isinstance(said, dict) or said.keys() - {"goal"} != {"name"}:
        raise ValueError("metric: name one, as in {name: validation/accuracy, goal: maximize}")
    name, goal = str(said["name"]), said.get("goal", "minimize")
    if goal not in ("minimize", "maximize"):
        raise ValueError(f"metric: goal: {goal!r} is neither minimize nor maximize")
    if not re.fullmatch(r"(train|validation|test)/.+", name):
        raise ValueError(f"metric: name: {name!r} must begin with train/, validation/ or test/")
    return name, goal


def _command(said: dict[str, Any]) -> tuple[str, ...]:
    command = said.get("command", USUAL_COMMAND)
    if not isinstance(command, list):
        raise ValueError("command: must be a list of words")
    words = tuple(map(str, command))
    if "${program}" in words and not isinstance(said.get("program"), str):
        raise ValueError("program: ${program} needs one, as in program: train_maml.py")
    if "${args}" not in words:
        raise ValueError("command: has no ${args}, so that every trial would be the same")
    return words


# ---- parameters: W&B's distributions, each as one of Optuna's --------------------------------


def _among(values: list[Any]) -> CategoricalDistribution:
    if not isinstance(values, list) or not values:
        raise ValueError("values: must be a list of at least one")
    for value in values:
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"{value!r} is no value of a flag")
    return CategoricalDistribution(list(dict.fromkeys(values)))  # Optuna, too, takes 1 for 1.0


def _integers(low: int, high: int) -> IntDistribution:
    if max(-low, high) > 2**53:
        raise ValueError("min and max must lie within ±2**53, where floats are exact")
    return IntDistribution(low, high)


def _between(min: Any, max: Any, *, log: bool = False) -> FloatDistribution:
    low, high = float(min), float(max)  # YAML reads 1e-3 as text
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"min {min} must be below max {max}")
    return FloatDistribution(low, high, log=log)


KINDS: dict[str, Callable[..., BaseDistribution]] = {
    "constant": lambda value: _among([value]),
    "categorical": lambda values: _among(values),
    "int_uniform": lambda min, max: _integers(int(min), int(max)),
    "uniform": lambda min, max: _between(min, max),
    "log_uniform_values": lambda min, max: _between(min, max, log=True),
}
"""Maps those of W&B's distributions that are known here to a function that makes Optuna's."""


def _parameter(name: Any, said: Any) -> BaseDistribution:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", str(name)):
        raise ValueError(f"parameters: {name!r} is no name of a flag")
    try:
        if not isinstance(said, dict):
            raise ValueError("must be a mapping, as in {values: [1, 2]}")
        kind = said.get("distribution", _usual(said))
        if kind not in KINDS:
            raise ValueError(f"distribution {kind!r} is not one of {', '.join(KINDS)}")
        facts = {str(key): value for key, value in said.items() if key != "distribution"}
        taken = inspect.signature(KINDS[kind]).parameters
        if facts.keys() != taken.keys():
            raise ValueError(f"{kind} has {' and '.join(taken)}")
        return KINDS[kind](**facts)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"parameters: {name}: {error}") from error


def _usual(said: dict[str, Any]) -> str:
    """Return the distribution that W&B assumes if the file names none."""
    if "value" in said:
        return "constant"
    if "values" in said:
        return "categorical"
    return "int_uniform" if all(type(said.get(k)) is int for k in ("min", "max")) else "uniform"
