"""Values of a sweep's parameters: as its file has them, and which run of a folder has which."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from maml.errors import UserError
from maml.run.files import read_object
from maml.studies.recorded import misfit

T = TypeVar("T")
STUDY = "study.json"
"""What `launch.study` writes."""

Point = dict[str, Any]
"""A value for every parameter, by name."""


class Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number that it is, and 2026-11-22 as text.

    YAML 1.1 would have the first written 1.0e-3, and the second is a date there, which no flag is.
    """


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in those if not tag.endswith(":timestamp")]
    for first, those in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def value_of(text: str) -> Any:
    """Return what ``text`` would be as a value in a sweep's file: 1e-1 is 0.1."""
    try:
        return Loader(text).get_single_data()
    except yaml.YAMLError:
        return text


def setting_of(point: Point, names: Iterable[str]) -> str:
    """Name a setting by the values of these parameters: ``inner_lr=0.4 inner_steps=1``."""
    return " ".join(f"{name}={point[name]}" for name in names) or "the only setting"


def settings(names: Iterable[str], trials: Iterable[tuple[Point, T]]) -> dict[str, list[T]]:
    """Return what has the same values of these parameters together, its seed apart."""
    found: dict[str, list[T]] = {}
    for point, trial in trials:
        found.setdefault(setting_of(point, (n for n in names if n != "seed")), []).append(trial)
    return found


def read_study(folder: Path) -> dict[str, Any]:
    """Return what a kept study's study.json says.

    Raises:
        UserError: naming it, if it is missing or damaged.
    """
    said = read_object(folder / STUDY)
    trial = {"run": str, "point": dict, "git_commits": list}
    if wrong := misfit(said, {"trials": [trial], "against": str, "note": str, "hardware": dict}):
        raise UserError(f"{folder / STUDY}: damaged: its {wrong}")
    return said
