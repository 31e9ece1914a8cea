"""Components (data sets, networks, learners, strategies) that own their facts.

A component's file declares its components in a literal at its top level::

    COMPONENTS = {"glyphs": {"attribute": "open_classes", "help": "one line", ...}}

:func:`scan` reads these literals as text and imports nothing, so that ``--help`` and a mistyped
flag need not wait for torch. A component can be ``"like"`` another component, of any file. Then it
starts with that component's facts, and its ``reads`` add to those of that component. A user's own
file can hold components, too: their names are accepted wherever a component's name is
(:mod:`datasets.theirs`).
"""

import ast
import contextlib
import copy
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from datasets.errors import DataError, needs


@dataclass(frozen=True)
class Component:
    """The facts of a component. A subclass for each kind of component adds facts."""

    # How many positional arguments this program passes to a component of this kind.
    GIVEN: ClassVar[int] = 1

    name: str  # the value of its flag: a name, or a user's own name (`datasets.theirs`)
    module: str
    attribute: str = ""  # its name in the module
    arguments: Mapping[str, Any] = field(default_factory=dict)  # written in a user's own name
    help: str = ""  # one line for --help
    # Fields of the configuration that it reads and some other components of its kind do not. None:
    # it may read any field, because nothing is known about a user's own component.
    reads: tuple[str, ...] | None = ()
    # Fields that it does not read, but others of its kind do, each with the reason: a verb phrase.
    ignores: Mapping[str, str] = field(default_factory=dict)
    # Values that it cannot work with, by field, each with the reason: a verb phrase.
    refuses: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)

    @property
    def is_theirs(self) -> bool:
        """Return whether the component is in a user's own file."""
        return is_theirs(self.name)

    def load(self) -> Any:
        """Import the component's module and return the component."""
        with contextlib.nullcontext() if self.is_theirs else needs("train", self.name):
            module = importlib.import_module(self.module)
        return getattr(module, self.attribute)

    def maker(self) -> Callable[..., Any]:
        """Return the loaded component as a callable, with a user's own arguments bound."""
        # Copy, because a callee may change a list that it gets. The next call needs the original.
        arguments = copy.deepcopy(dict(self.arguments))
        return functools.partial(self.load(), **arguments) if arguments else self.load()


Kind = TypeVar("Kind", bound=Component)


def scan(folders: Iterable[Path], root: Path, kind: type[Kind]) -> dict[str, Kind]:
    """Return the components of all files under ``folders``, by name, in alphabetical file order.

    Modules are imported from ``root``. Facts are keyword arguments of ``kind``.
    """
    facts: dict[str, dict[str, Any]] = {}
    files = [(path.relative_to(top), path) for top in folders for path in top.rglob("*.py")]
    for _, path in sorted(files):
        text = path.read_text(encoding="utf-8")
        if "\nCOMPONENTS" not in text:
            continue
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for line in ast.parse(text).body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "COMPONENTS":
                for name, of_one in ast.literal_eval(line.value).items():
                    if name in facts:
                        raise ValueError(f"{module} and {facts[name]['module']} both have {name!r}")
                    facts[name] = {"module": module, **of_one}
    return {name: _made(name, facts, kind) for name in facts}


def _made(name: str, facts: dict[str, dict[str, Any]], kind: type[Kind]) -> Kind:
    """Return a component from its facts and those of the component that it is like."""
    other = facts.get(facts[name].get("like", ""), {})
    joined = {"ignores": {}, **other, **facts[name]}
    reads = (*other.get("reads", ()), *facts[name].get("reads", ()))
    joined["reads"] = tuple(field for field in reads if field not in joined["ignores"])
    joined.pop("like", None)
    return kind(name=name, **joined)


def is_theirs(name: str) -> bool:
    """Return whether a name refers to a user's own file, as ``module:attribute``."""
    return ":" in name.partition("(")[0]


def named(flag: str, name: str, there: Mapping[str, Kind]) -> Kind:
    """Return our component with this name, or raise :class:`DataError`."""
    if name in there:
        return there[name]
    near = difflib.get_close_matches(name, there, n=1)
    there_are = f"did you mean {near[0]}? There are" if near else "there are"
    raise DataError(
        f"{flag} {name}: unknown; {there_are} {', '.join(there)}; "
        "or module:attribute, for one of your own"
    )
