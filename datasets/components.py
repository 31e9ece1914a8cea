"""Components (data sets, networks, learners, strategies) that own their facts.

A component's file says what it holds in a literal at its top level::

    COMPONENTS = {"glyphs": {"attribute": "open_classes", "help": "one line", ...}}

:func:`scan` reads these literals as text and imports nothing, so that ``--help`` and a mistyped
flag need not wait for torch. A component that is ``"like"`` another one, of any file, begins with
that one's facts and flags. Wherever a name is accepted, one in a user's own file is, too
(:mod:`datasets.theirs`).
"""

import ast
import copy
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from datasets.errors import DataError
from datasets.flags import OwnFlag, own_flags


@dataclass(frozen=True)
class Component:
    """What a component says of itself; a kind of components adds facts of its own."""

    # With how many arguments, by position, this program calls one of its kind.
    GIVEN: ClassVar[int] = 1

    name: str  # what its flag is given: a name, or a user's own as `datasets.theirs` has it
    module: str
    attribute: str = ""  # what it is called there
    arguments: Mapping[str, Any] = field(default_factory=dict)  # that a user's own name has
    help: str = ""  # one line for --help
    # The configuration's fields that only some components of its kind read, and it does. None: any,
    # as of a user's own, of which nothing is known.
    reads: tuple[str, ...] | None = ()
    # Fields that all others of its kind read, and why it does not: a predicate.
    ignores: Mapping[str, str] = field(default_factory=dict)
    # Values that it cannot work with, by field, and why not: a predicate.
    refuses: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    # The fields of its own file (`datasets.flags`), and of the file of the one that it is like.
    flags: Mapping[str, OwnFlag] = field(default_factory=dict)

    @property
    def is_theirs(self) -> bool:
        """Whether it lives in a user's own file."""
        return is_theirs(self.name)

    def load(self) -> Any:
        """Import its module and return it."""
        return getattr(importlib.import_module(self.module), self.attribute)

    def maker(self) -> Callable[..., Any]:
        """What to call for one: what :meth:`load` returns, with a user's own arguments, if any."""
        # Copied: who changes a list that it is given must not change what the next one is given.
        arguments = copy.deepcopy(dict(self.arguments))
        return functools.partial(self.load(), **arguments) if arguments else self.load()


Kind = TypeVar("Kind", bound=Component)


def scan(folders: Iterable[Path], root: Path, kind: type[Kind]) -> dict[str, Kind]:
    """The components of all files under ``folders``, in alphabetical order of file, by name.

    ``root`` is where modules are imported from; facts are keyword arguments of ``kind``.
    """
    own: dict[str, dict[str, Any]] = {}
    files = [(path.relative_to(each), path) for each in folders for path in each.rglob("*.py")]
    for _, path in sorted(files):
        text = path.read_text(encoding="utf-8")
        if "\nCOMPONENTS" not in text:
            continue
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        tree = ast.parse(text)
        for name, facts in _literal(tree).items():
            if name in own:
                raise ValueError(f"{module} and {own[name]['module']} both have {name!r}")
            own[name] = {"module": module, "flags": own_flags(tree), **facts}
    return {name: _made(name, own, kind) for name in own}


def _literal(tree: ast.Module) -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "COMPONENTS":
            facts = ast.literal_eval(statement.value)
    return facts


def _made(name: str, own: dict[str, dict[str, Any]], kind: type[Kind]) -> Kind:
    """A component of its own facts, and those that it has of the one that it is like."""
    facts = own[name]
    other = own[facts["like"]] if "like" in facts else {}
    facts = {**other, **facts, "flags": other.get("flags", {}) | facts["flags"]}
    facts["reads"] = (*facts.get("reads", ()), *facts["flags"])
    return kind(name=name, **{fact: value for fact, value in facts.items() if fact != "like"})


def is_theirs(name: str) -> bool:
    """Whether a name means something in a user's own file, as ``module:attribute``."""
    return ":" in name.partition("(")[0]


def named(flag: str, name: str, there: Mapping[str, Kind]) -> Kind:
    """The component of ours that is called so, or :class:`DataError`."""
    if name in there:
        return there[name]
    near = difflib.get_close_matches(name, there, n=1)
    there_are = f"did you mean {near[0]}? There are" if near else "there are"
    raise DataError(
        f"{flag} {name}: unknown; {there_are} {', '.join(there)}; "
        "or module:attribute, for one of your own"
    )
