"""Values of a sweep's parameters: as its file has them, and which run of a folder has which."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from maml.errors import UserError
from maml.run.files import read_object

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


def read_study(folder: Path) -> dict[str, Any]:
    """Return what a kept study's study.json says.

    Raises:
        UserError: naming it, if it is missing or damaged.
    """
    said = read_object(folder / STUDY)
    try:
        for trial in said["trials"]:
            trial["run"], trial["point"], trial["git_commits"]
        said["against"], said["note"], said["hardware"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / STUDY}: damaged: {error!r}") from error
    return said
