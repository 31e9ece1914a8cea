"""A sweep's file, in W&B's own format: read, and refused in one line where it cannot be run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.sweeping.parameters import Parameter, read_parameter
from maml.errors import UserError

METHODS = ("grid", "random", "bayes")
IGNORED = ("apiVersion", "kind", "controller", "description", "entity", "project", "name")
"""What W&B reads and a sweep without a server has no use for."""
KNOWN = (
    "method", "parameters", "program", "command", "metric", "early_terminate", "run_cap", *IGNORED
)  # fmt: skip
FIXED = ("method", "metric", "program", "command", "early_terminate")
"""What must not change once trials were run."""
USUAL_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")

Point = dict[str, Any]
"""A value for every parameter, by name."""


@dataclass(frozen=True)
class Metric:
    """What trials are ranked by.

    Attributes:
        name: ``<split>/<metric>``, as the loggers name it: ``validation/accuracy``.
        goal: "maximize" or "minimize".
    """

    name: str
    goal: str

    @property
    def sign(self) -> int:
        """What a value is multiplied by, for the greatest to be the best."""
        return 1 if self.goal == "maximize" else -1


@dataclass(frozen=True)
class Hyperband:
    """When trials that do badly are ended (W&B's ``early_terminate``).

    Attributes:
        bands: After how many values of the metric a trial is looked at.
        eta: At each, the best 1/eta go on.
        strict: Judge a trial by its value at the band, rather than by its best so far.
    """

    bands: tuple[int, ...]
    eta: float
    strict: bool


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file describes it.

    Attributes:
        path: The file.
        method: One of `METHODS`.
        parameters: In the order of their names, as W&B goes through them.
        metric: None where the file names none.
        program: What ``${program}`` is; "" where the command does not need it.
        command: The words of the command line, macros not filled in.
        early: When to end trials early; None: never.
        run_cap: How many trials at most; None where the file does not say.
        said: The file's content, to tell later whether it has changed.
        trusted: Whether it may name other programs than ours, and code of a user's own.
    """

    path: Path
    method: str
    parameters: tuple[Parameter, ...]
    metric: Metric | None
    program: str
    command: tuple[str, ...]
    early: Hyperband | None
    run_cap: int | None
    said: dict[str, Any]
    trusted: bool

    def grid(self) -> Iterator[Point]:
        """Yield the points of the grid, the last parameter's value changing fastest."""
        names = [parameter.name for parameter in self.parameters]
        for values in itertools.product(*(parameter.steps or [] for parameter in self.parameters)):
            yield dict(zip(names, values, strict=True))

    @property
    def size(self) -> int | None:
        """How many points there are, in a grid or otherwise; None where there is no end of them."""
        each = [p.steps if self.method == "grid" else p.values for p in self.parameters]
        if any(values is None for values in each):
            return None
        return math.prod(len(values) for values in each if values is not None)

    @property
    def varied(self) -> tuple[str, ...]:
        """The names of the parameters that may have more than one value."""
        return tuple(p.name for p in self.parameters if p.values is None or len(p.values) > 1)

    def misfit(self, before: dict[str, Any], points: dict[int, Point]) -> str:
        """Say why this file is not that of a sweep that was begun; "" where it is.

        A file may be extended: by values of a parameter, or wider bounds.

        Args:
            before: The content of the file when the sweep was begun, or last continued.
            points: What was run, by the trial's number.
        """
        for key in FIXED:
            if before.get(key) != self.said.get(key):
                return f"{key} was {before.get(key)!r}, and is {self.said.get(key)!r} now"
        if other := before["parameters"].keys() ^ {p.name for p in self.parameters}:
            return f"parameters: {min(other)} is not in both"
        for number, point in points.items():
            for parameter in self.parameters:
                value = point[parameter.name]
                if not parameter.may_be(value):
                    return f"parameters: {parameter.name} was {value!r} in trial {number}"
        return ""


def read(path: Path, *, trust: bool = False) -> SweepFile:
    """Read a sweep's file.

    Args:
        path: The file.
        trust: Whether its trials may be any program: see `launch.sweeping.command.command_of`.

    Raises:
        UserError: naming the file, and what in it cannot be.
    """

    def wrong(what: str) -> UserError:
        return UserError(f"{path}: {what}")

    try:
        said = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise wrong(f"cannot read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise wrong(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(said, dict):
        raise wrong("not a sweep: no mapping with method and parameters")
    if more := [str(key) for key in said if key not in KNOWN]:
        raise wrong(f"{', '.join(more)}: not known here; known are {', '.join(KNOWN)}")
    if said.get("method") not in METHODS:
        raise wrong(f"method: {said.get('method')!r} is not one of {', '.join(METHODS)}")
    parameters = said.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        raise wrong("parameters: there are none")
    for name in parameters:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", str(name)):
            raise wrong(f"parameters: {name!r} is no name of a flag")
    run_cap = said.get("run_cap")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise wrong(f"run_cap: {run_cap!r} is not a whole number of at least 1")
    file = SweepFile(
        path=path,
        method=said["method"],
        # Sorted: the order in which W&B goes through a grid.
        parameters=tuple(read_parameter(str(path), *item) for item in sorted(parameters.items())),
        metric=_metric(said.get("metric"), wrong),
        program=str(said.get("program", "")),
        command=_command(said, wrong),
        early=_early(said.get("early_terminate"), wrong),
        run_cap=run_cap,
        said=said,
        trusted=trust,
    )
    if file.method == "grid":
        for parameter in file.parameters:
            if parameter.steps is None:
                raise wrong(f"parameters: {parameter.name}: {parameter.kind} has no grid")
    if file.metric is None and (file.early is not None or file.method == "bayes"):
        what = "early_terminate" if file.early is not None else "method: bayes"
        raise wrong(
            f"metric: {what} needs one, as in {{name: validation/accuracy, goal: maximize}}"
        )
    return file


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number that it is, and 2026-11-22 as text.

    YAML 1.1 would have the first written 1.0e-3, and the second is a date there, which no flag is.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in those if not tag.endswith(":timestamp")]
    for first, those in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what `_Loader` would read as a number."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def written(said: Mapping[str, Any]) -> str:
    """Return what a file says as YAML, which reads as the same."""
    return yaml.dump(dict(said), Dumper=_Dumper, sort_keys=False)


def value_of(text: str) -> Any:
    """Return what ``text`` would be as a value in a sweep's file: 1e-1 is 0.1."""
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError:
        return text


def _metric(said: Any, wrong: Callable[[str], UserError]) -> Metric | None:
    if said is None:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise wrong("metric: must have a name")
    if said.keys() - {"name", "goal"}:
        raise wrong("metric: has a name and a goal, and nothing else here")
    goal = said.get("goal", "minimize")
    if goal not in ("minimize", "maximize"):
        raise wrong(f"metric: goal: {goal!r} is neither minimize nor maximize")
    if not re.fullmatch(r"(train|validation|test)/.+", said["name"]):
        raise wrong(
            f"metric: name: {said['name']!r} must begin with train/, validation/ or test/, as in "
            "validation/accuracy"
        )
    return Metric(said["name"], goal)


def _command(said: dict[str, Any], wrong: Callable[[str], UserError]) -> tuple[str, ...]:
    command = said.get("command", list(USUAL_COMMAND))
    if not isinstance(command, list) or not command:
        raise wrong("command: must be a list of words")
    words = tuple(map(str, command))
    if "${program}" in words and not isinstance(said.get("program"), str):
        raise wrong("program: ${program} needs one, as in program: train_maml.py")
    if not any(word.startswith("${args") for word in words):
        raise wrong("command: has no ${args}, so that every trial would be the same")
    return words


def _early(said: Any, wrong: Callable[[str], UserError]) -> Hyperband | None:
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("type") != "hyperband":
        raise wrong("early_terminate: type: must be hyperband")
    if said.keys() - {"type", "min_iter", "max_iter", "s", "eta", "strict"}:
        raise wrong("early_terminate: has min_iter, or max_iter and s; eta; strict")
    eta, strict = said.get("eta", 3), said.get("strict", True)
    if isinstance(eta, bool) or not isinstance(eta, int | float) or not 1 < eta < math.inf:
        raise wrong(f"early_terminate: eta: {eta!r} is not a number above 1")
    if type(strict) is not bool:
        raise wrong(f"early_terminate: strict: {strict!r} is neither true nor false")
    for key in ("min_iter", "max_iter", "s"):
        if key in said and (type(said[key]) is not int or said[key] < 1):
            raise wrong(f"early_terminate: {key}: {said[key]!r} is not a whole number, at least 1")
    if "max_iter" in said and "s" in said:
        backwards = [said["max_iter"] / eta**i for i in range(1, said["s"] + 1)]
        bands = sorted(int(band) for band in backwards if band >= 1)
    elif "min_iter" in said:
        bands = [int(said["min_iter"] * eta**i) for i in range(30)]
    else:
        raise wrong("early_terminate: needs min_iter, or max_iter and s")
    if not bands:
        raise wrong("early_terminate: no band lies below max_iter: a smaller eta, or a greater s")
    return Hyperband(tuple(bands), float(eta), strict)
