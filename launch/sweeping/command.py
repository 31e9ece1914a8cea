"""The command line of a trial: W&B's macros, filled in."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.sweeping.file import Point, SweepFile
from maml.config import cli
from maml.errors import UserError

ENVIRONMENT = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
REPOSITORY = Path(__file__).parents[2]
CHECKED = 64
"""So many points are tried against the program's flags before anything is run."""


def command_of(file: SweepFile, point: Point, run_dir: Path | None) -> list[str]:
    """Return the words of a trial's command line.

    Beside the point's values the program is given ``run_dir``: it is how a sweep finds what a trial
    has done, and how a trial that is started again goes on.

    Raises:
        UserError: naming the file, for a macro that is not known.
    """
    values = dict(point) if run_dir is None else {**point, "run_dir": str(run_dir)}
    macros = {**_arguments(values), "env": ["/usr/bin/env"], "interpreter": [sys.executable],
              "program": [_program(file)]}  # fmt: skip
    words = []
    for word in file.command:
        word = ENVIRONMENT.sub(lambda found: os.environ.get(found[1], found[1]), word)
        macro = re.fullmatch(r"\$\{(.*)\}", word)
        if macro is None:
            words.append(word)
        elif macro[1] in macros:
            words += macros[macro[1]]
        else:
            known = ", ".join(f"${{{name}}}" for name in macros)
            raise UserError(f"{file.path}: command: {word} is not known here; known are {known}")
    return words


def _program(file: SweepFile) -> str:
    """Return where the program is: as the file says, else beside this one's own.

    A sweep over components of a user's own is begun in their folder, where ours is not.
    """
    ours = REPOSITORY / file.program
    return str(ours) if not Path(file.program).exists() and ours.is_file() else file.program


def _arguments(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return a point's values in each of W&B's spellings."""
    plain = [f"{name}={value}" for name, value in values.items()]
    switches = []
    for name, value in values.items():
        if value is True:
            switches.append(f"--{name}")
        elif value is not False:
            switches.append(f"--{name}={value}")
    return {
        "args": [f"--{word}" for word in plain],
        "args_no_hyphens": plain,
        "args_no_equals": [w for n, v in values.items() for w in (f"--{n}", str(v))],
        "args_no_boolean_flags": switches,
        "args_json": [json.dumps(values)],
        "args_append_hydra": [f"+{word}" for word in plain],
        "args_override_hydra": [f"++{word}" for word in plain],
    }


def check(file: SweepFile) -> None:
    """Try the flags of each value, and a grid's first points, where the program is train_maml.py.

    A mistyped flag is told now, rather than by each trial.

    Raises:
        UserError: naming the file, the point and its flag.
    """
    if "${program}" in file.command and not Path(_program(file)).is_file():
        raise UserError(f"{file.path}: program: there is no {file.program} here")
    middle = {p.name: p.at(0.5) for p in file.parameters}
    # Each value once, the others as they are in the middle.
    each = (middle | {p.name: value} for p in file.parameters for value in p.values or ())
    points = [middle, *itertools.islice(each, CHECKED)]
    if file.method == "grid":
        points += [point for point, _ in zip(file.grid(), range(CHECKED), strict=False)]
    for point in points:
        words = command_of(file, point, None)
        at = next((i for i, word in enumerate(words) if Path(word).name == "train_maml.py"), None)
        if at is None:
            return
        try:
            cli.parse(words[at + 1 :])
        except UserError as error:
            raise UserError(f"{file.path}: with {_shown(file, point)}: {error}") from error


def _shown(file: SweepFile, point: Point) -> str:
    return " ".join(f"{name}={point[name]}" for name in file.varied or point)
