"""What a file names is not what its reader names: it is imported only where the reader trusts it.

Whoever types a component's name means it. A file (a run's config.yaml, a record) may come from
anybody, and hold any name. There it is a :class:`FromFile`, and :mod:`datasets.theirs` refuses to
import it. Who has been told to trust the file makes a plain ``str`` of it.

Nothing here imports torch, or what a file names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple


class Said(NamedTuple):
    """What a file says of a user's own components.

    * ``file``: the file
    * ``names``: the components that it names, by flag
    """

    file: Path
    names: Mapping[str, str]


class FromFile(str):
    """A component's name that a file has said, and nobody else; ``str()`` of it is believed."""

    said: Said

    def __new__(cls, name: str, said: Said) -> FromFile:
        """``name``, as ``said`` has it."""
        found = super().__new__(cls, name)
        found.said = said
        return found

    def __getnewargs__(self) -> tuple[str, Said]:  # type: ignore[override]
        return str(self), self.said


def refusal(name: str) -> str:
    """A line about the file that has said ``name``, and what it would import; "" if none has."""
    if not isinstance(name, FromFile):
        return ""
    said = name.said
    each = [
        f"{flag} {' '.join(spelled.split())} ({_place(spelled)})"
        for flag, spelled in said.names.items()
    ]
    return (
        f"{said.file}: it names code to import: {' and '.join(each)}; if you trust it, give "
        "--trust, or trust=True in Python"
    )


def _place(spelled: str) -> str:
    """Which file a name means here."""
    return str(source_of(spelled.partition(":")[0]) or "which is not here")


def search_path() -> list[str]:
    """Where modules of a user's own are looked for: also in the current folder.

    As ``python -m`` does; a program that is started by its path has its own folder there alone.
    """
    here = str(Path.cwd())
    known = here in sys.path or "" in sys.path
    return [*sys.path] if known else [*sys.path[:1], here, *sys.path[1:]]


def source_of(module: str) -> Path | None:
    """The file that a module would be imported from. No package that it is in is imported, either.

    None if there is no such file.
    """
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if file else None
    places, parts, spec = search_path(), module.split("."), None
    for i in range(len(parts)):
        try:
            spec = PathFinder.find_spec(".".join(parts[: i + 1]), places)
        except KeyError:  # a package without a file, in another one that is not imported
            return None
        if spec is None:
            return None
        places = [*(spec.submodule_search_locations or ())]
    return Path(spec.origin) if spec and spec.origin else None
