"""A sweep's file, in W&B's own format: read, and refused in one line where it cannot be run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner

from maml.errors import UserError
from maml.studies.sweeping.distributions import read_parameter, values_of
from maml.studies.sweeping.points import Loader, Point

METHODS = ("grid", "random", "bayes")
IGNORED = ("apiVersion", "kind", "controller", "description", "entity", "project", "name")
"""What W&B reads and a sweep without a server has no use for."""
KNOWN = (
    "method", "parameters", "program", "command", "metric", "early_terminate", "run_cap", *IGNORED
)  # fmt: skip
USUAL_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file describes it.

    Attributes:
        path: The file.
        method: One of `METHODS`.
        space: What Optuna draws each parameter from, in the order of their names, as W&B goes
            through them. A parameter is a flag of the program.
        metric: What trials are ranked by: ``<split>/<metric>``, as the loggers name it.
        goal: "maximize" or "minimize" it.
        program: What ``${program}`` is; "" where the command does not need it.
        command: The words of the command line, macros not filled in.
        pruner: When to end trials early.
        run_cap: How many trials at most; None where the file does not say.
        said: The file's content, to tell later whether it has changed.
        trusted: Whether it may name other programs than ours, and code of a user's own.
    """

    path: Path
    method: str
    space: dict[str, BaseDistribution]
    metric: str
    goal: str
    program: str
    command: tuple[str, ...]
    pruner: BasePruner
    run_cap: int | None
    said: dict[str, Any]
    trusted: bool

    def grid(self) -> Iterator[Point]:
        """Yield the points where all values are known, the last parameter's changing fastest."""
        for values in itertools.product(*(values_of(each) or [] for each in self.space.values())):
            yield dict(zip(self.space, values, strict=True))

    @property
    def size(self) -> int | None:
        """How many points there are; None where there is no end of them."""
        each = [values_of(space) for space in self.space.values()]
        return None if None in each else math.prod(len(values or ()) for values in each)

    @property
    def varied(self) -> list[str]:
        """The names of the parameters that may have more than one value."""
        each = {name: values_of(space) for name, space in self.space.items()}
        return [name for name, values in each.items() if values is None or len(values) > 1]


def read(path: Path, *, trust: bool = False) -> SweepFile:
    """Read a sweep's file.

    Args:
        path: The file.
        trust: Whether its trials may be any program: see `command_of`.

    Raises:
        UserError: naming the file, and what in it cannot be.
    """
    try:
        return _read(path, Loader(path.read_text(encoding="utf-8")).get_single_data(), trust)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _read(path: Path, said: Any, trust: bool) -> SweepFile:
    if not isinstance(said, dict):
        raise ValueError("not a sweep: no mapping with method and parameters")
    if more := [str(key) for key in said if key not in KNOWN]:
        raise ValueError(f"{', '.join(more)}: not known here; known are {', '.join(KNOWN)}")
    method, parameters, run_cap = (said.get(k) for k in ("method", "parameters", "run_cap"))
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is not one of {', '.join(METHODS)}")
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError("parameters: there are none")
    for name in parameters:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", str(name)):
            raise ValueError(f"parameters: {name!r} is no name of a flag")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise ValueError(f"run_cap: {run_cap!r} is not a whole number of at least 1")
    # Sorted: the order in which W&B goes through a grid.
    space = {name: read_parameter(name, parameters[name]) for name in sorted(parameters)}
    for name, each in space.items():
        if method == "grid" and values_of(each) is None:
            raise ValueError(f"parameters: {name}: a grid needs an end of values")
    metric, goal = _metric(said.get("metric"))
    return SweepFile(
        path=path,
        method=method,
        space=space,
        metric=metric,
        goal=goal,
        program=str(said.get("program", "")),
        command=_command(said),
        pruner=_pruner(said.get("early_terminate")),
        run_cap=run_cap,
        said=said,
        trusted=trust,
    )


def _metric(said: Any) -> tuple[str, str]:
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
    if not isinstance(command, list) or not command:
        raise ValueError("command: must be a list of words")
    words = tuple(map(str, command))
    if "${program}" in words and not isinstance(said.get("program"), str):
        raise ValueError("program: ${program} needs one, as in program: train_maml.py")
    if not any(word.startswith("${args") for word in words):
        raise ValueError("command: has no ${args}, so that every trial would be the same")
    return words


def _pruner(said: Any) -> BasePruner:
    """Return Optuna's rule that stands for W&B's: Hyperband without its brackets."""
    if said is None:
        return NopPruner()
    form = "must be {type: hyperband, min_iter: 2, eta: 3}, or have max_iter and s for min_iter"
    if not isinstance(said, dict) or said.get("type") != "hyperband":
        raise ValueError(f"early_terminate: {form}")
    eta, asked = said.get("eta", 3), said.keys() - {"type", "eta", "strict"}
    numbers = [eta, *(said[key] for key in asked)]
    whole = all(type(number) is int and number > 0 for number in numbers) and eta > 1
    if asked not in ({"min_iter"}, {"max_iter", "s"}) or not whole or not said.get("strict", True):
        raise ValueError(f"early_terminate: {form}; whole numbers, eta above 1; strict alone")
    first = said["min_iter"] if "min_iter" in said else said["max_iter"] // eta ** said["s"]
    return SuccessiveHalvingPruner(min_resource=max(1, first), reduction_factor=eta)
