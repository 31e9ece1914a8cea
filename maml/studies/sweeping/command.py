"""The command line of a trial: W&B's macros, filled in."""

import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maml.config import cli
from maml.errors import UserError
from maml.studies import REPOSITORY
from maml.studies.sweeping.file import Point, SweepFile, setting_of
from maml.studies.sweeping.sweep import next_point

CHECKED = 64
"""At most this many points, after the first, are checked before any trial runs."""


def command_of(file: SweepFile, point: Point, run_dir: Path | None) -> list[str]:
    """Return the words of a trial's command line.

    With ``run_dir``, the sweep finds the trial's results, and a restarted trial continues. Raise
    UserError, which names the file, for an unknown macro; if the file is not trusted, also for a
    program that is not ours or for a word that may name code.
    """
    words = _words(file, point)
    if not file.trusted and (why := _code_in(words)):
        raise UserError(f"{file.path}: {why}; if you trust the file, give --trust")
    return words if run_dir is None else _words(file, {**point, "run_dir": str(run_dir)})


def _code_in(words: list[str]) -> str:
    """Describe what in a trial's command line may run code other than ours; "" if nothing may."""
    begun = [word for word in words[:2] if word not in ("/usr/bin/env", sys.executable)]
    name, *arguments = [*begun, *words[2:], ""]
    program = Path(name).resolve()
    if name == "-m":
        module, *arguments = arguments
        name, program = f"-m {module}", _file_of(module)
    known = [REPOSITORY / file for file in ("train_maml.py", "launch/workers.py", "launch/local")]
    if program not in known and program.parent != REPOSITORY / "launch" / "sweeps":
        return f"command: it runs {name or words[0]}, which is no training program of this project"
    # As in --network=my_file:Net. A digit after the colon is no name, as in cuda:0.
    if named := [word for word in arguments if re.search(r":(?!\d)", word)]:
        return f"it names code to import: {' and '.join(named)}"
    if trusts := [word for word in arguments if re.match(r"[-+]*trust(=|$)", word)]:
        return f"it says {trusts[0]} to its trials"
    return ""


def _file_of(module: str) -> Path:
    """Return the file that ``python -m`` runs; Python looks in the current folder first."""
    package = module.partition(".")[0]
    here = Path.cwd().resolve()
    shadowed = any((here / name).exists() for name in (package, f"{package}.py"))
    return (here if shadowed else REPOSITORY) / f"{module.replace('.', '/')}.py"


def _words(file: SweepFile, values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line with macros filled in; errors as in `command_of`."""
    macros = {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": [sys.executable],
        "${program}": [_program(file)],
        "${args}": [f"--{name}={value}" for name, value in values.items()],
    }
    words: list[str] = []
    for word in file.command:
        if "${" in word and word not in macros:
            known = ", ".join(macros)
            raise UserError(f"{file.path}: command: {word} is not known here; known are {known}")
        words += macros.get(word, [word])
    return words


def _program(file: SweepFile) -> str:
    """Return the program's path: as the file gives it, or else in this repository."""
    program = str(file.said.get("program", ""))
    ours = REPOSITORY / program
    return str(ours) if not Path(program).exists() and ours.is_file() else program


def check(file: SweepFile) -> None:
    """Parse the flags of each value before any trial runs, if the program is train_maml.py."""
    if "${program}" in file.command and not Path(_program(file)).is_file():
        raise UserError(f"{file.path}: program: there is no {_program(file)} here")
    first = next_point(file, [], "")
    assert first is not None
    # Each value once; the other parameters keep their values of the first point.
    each = (first | {name: value} for name, values in file.values.items() for value in values or ())
    for point in [first, *itertools.islice(each, CHECKED)]:
        words = command_of(file, point, None)
        at = next((i for i, word in enumerate(words) if Path(word).name == "train_maml.py"), None)
        if at is None:
            return
        try:
            cli.parse(words[at + 1 :])
        except UserError as error:
            raise UserError(
                f"{file.path}: with {setting_of(point, file.varied or point)}: {error}"
            ) from error
