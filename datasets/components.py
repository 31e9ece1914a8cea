"""Components (data sets, and in ``maml`` networks, learners, strategies) that own their facts.

A component's file says what it holds in a literal at its top level::

    COMPONENTS = {"glyphs": {"attribute": "open_classes", "help": "one line", ...}}

:func:`scan` reads these literals as text and imports nothing, so that ``--help`` and a mistyped
flag need not wait for torch. A component that is ``"like"`` another one of its file begins with
that one's facts. To add a component, add a file: no list elsewhere names it. Whatever a
name is accepted for takes ``module:attribute``, too: a component in a user's own file, which
:func:`load_theirs` imports.

Nothing here imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from datasets.errors import DataError

LITERAL = "COMPONENTS"


@dataclass(frozen=True)
class Component:
    """What a component says of itself; a kind of components adds facts of its own.

    Attributes:
        name: What its flag is given: a name, or ``module:attribute`` for a user's own.
        module: The module that holds it.
        attribute: What it is called there.
        help: One line for ``--help``.
        reads: The configuration's fields that only some components of its kind read, and it does.
            None: any, as of a user's own, of which nothing is known.
        ignores: Fields that all others of its kind read, and why it does not: a predicate.
        refuses: Values that it cannot work with, by field, and why not: a predicate.
    """

    name: str
    module: str
    attribute: str = ""
    help: str = ""
    reads: tuple[str, ...] | None = ()
    ignores: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)

    @property
    def is_theirs(self) -> bool:
        """Whether it lives in a user's own file."""
        return ":" in self.name

    def load(self) -> Any:
        """Import its module and return it."""
        return getattr(importlib.import_module(self.module), self.attribute)


Kind = TypeVar("Kind", bound=Component)


def scan(folder: Path, package: str, kind: type[Kind]) -> dict[str, Kind]:
    """The components of all files under ``folder``, in alphabetical order of file, by name.

    ``package`` is the module name of ``folder``; facts are keyword arguments of ``kind``.
    """
    found: dict[str, Kind] = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f"\n{LITERAL}" not in text:
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join((package, *(part for part in parts if part != "__init__")))
        for name, facts in _literal(ast.parse(text)).items():
            if name in found:
                raise ValueError(f"{module} and {found[name].module} both have {name!r}")
            found[name] = kind(name=name, module=module, **facts)
    return found


def _literal(tree: ast.Module) -> dict[str, dict[str, Any]]:
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == LITERAL for target in targets):
            facts: dict[str, dict[str, Any]] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            return {name: _with_likeness(own, facts) for name, own in facts.items()}
    return {}


def _with_likeness(own: dict[str, Any], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A component's facts, and those that it has of the one that it is like."""
    other = facts[own["like"]] if "like" in own else {}
    return {**other, **{name: value for name, value in own.items() if name != "like"}}


def is_theirs(spelled: str) -> bool:
    """Whether a name means something in a user's own file: ``module:attribute``."""
    return ":" in spelled


def unknown(flag: str, name: str, there: Iterable[str]) -> str:
    """A line about a name that there is not."""
    near = difflib.get_close_matches(name, there, n=1)
    module, _, attribute = name.rpartition(".")
    if module and not near:  # as Python writes it
        near = [f"{module}:{attribute}"]
    there_are = f"did you mean {near[0]}? There are" if near else "there are"
    return (
        f"{flag} {name}: unknown; {there_are} {', '.join(there)}; "
        "or module:attribute, for one of your own"
    )


def load_theirs(flag: str, spelled: str) -> Any:
    """What ``module:attribute`` means: the module is imported, also from the current directory.

    Raises :class:`DataError`, in one line that begins with ``flag`` and ``spelled``, if there is no
    such module or attribute, or if the module ends in an exception of its own.
    """
    module_name, _, attribute = spelled.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise DataError(f"{flag} {spelled}: write module:attribute, as in my_file:MyClass")
    # As `python -m` does; a program that is started by its path has its own folder there alone.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(1, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise DataError(f"{flag} {spelled}: {described(error)}") from error
        raise DataError(
            f"{flag} {spelled}: there is no module {error.name} in {here} or on PYTHONPATH"
        ) from error
    except Exception as error:
        raise DataError(f"{flag} {spelled}: {described(error)}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        file = getattr(module, "__file__", None) or "it has no file"
        raise DataError(f"{flag} {spelled}: module {module_name} ({file}) has no {attribute}{hint}")
    return getattr(module, attribute)


@contextlib.contextmanager
def calling(
    components: Mapping[str, Component], passing: type[Exception] = DataError
) -> Iterator[None]:
    """Turn what a user's own component raises inside into a :class:`DataError` of one line.

    ``components`` are those at work, by flag. Errors of ours pass through: they are faults of this
    program. So do :class:`DataError` and ``passing``, which are one line already.
    """
    try:
        yield
    except (DataError, passing):
        raise
    except Exception as error:
        theirs = {flag: each for flag, each in components.items() if each.is_theirs}
        if not theirs:
            raise
        blamed = _where_it_happened(error, theirs) or theirs
        names = " or ".join(f"{flag} {each.name}" for flag, each in blamed.items())
        raise DataError(f"{names}: {described(error)}") from error


def _where_it_happened(
    error: BaseException, components: Mapping[str, Component]
) -> dict[str, Component]:
    """The component in whose code the error arose; several, if that cannot be told."""
    files = {flag: _files(each) for flag, each in components.items()}
    found: dict[str, Component] = {}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        here = {flag: c for flag, c in components.items() if _is_in(code.co_filename, files[flag])}
        # Of several in one file: whose own code it is.
        own = {
            f: c for f, c in here.items() if f"{code.co_qualname}.".startswith(f"{c.attribute}.")
        }
        if len(own) == 1 or len(here) == 1:
            return own if len(own) == 1 else here
        found = found or here
    return found


def files_of(component: Component) -> dict[str, str]:
    """The files of a user's component that is loaded, by module: where it is named, and defined."""
    loaded = getattr(sys.modules.get(component.module), component.attribute, None)
    modules = {component.module, getattr(loaded, "__module__", component.module)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    return {name: file for name, file in files.items() if file}


def _files(component: Component) -> set[str]:
    """Those files, or the package that one is."""
    return {file.removesuffix("__init__.py") for file in files_of(component).values()}


def _is_in(file: str, places: set[str]) -> bool:
    """Whether a file is one of ``places``, or in a folder that is."""
    return any(
        file == place or (place.endswith("/") and file.startswith(place)) for place in places
    )


NO_DRAWS = (
    "Here the same seed must give the same numbers in every process, so a network may not draw its "
    "own: leave it out"
)
"""Why dropout and the like are refused."""

_PLAIN = {
    "in randomness error mode": f"it draws random numbers, as dropout does. {NO_DRAWS}",
}
"""What a library says of a mistake in words of its own, and what it means here."""


def described(error: BaseException) -> str:
    """An exception in one line, with the last place in a user's file that it passed."""
    text = " ".join(str(error).split())
    for theirs, plain in _PLAIN.items():
        text = plain if theirs in text else text
    if isinstance(error, SyntaxError):  # its text names the file
        return f"{type(error).__name__}: {text}"
    kind = type(error).__name__ + (f": {text}" if text else "")
    repository = Path(__file__).parents[1]
    libraries = (
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    ours = (*libraries, *(str(repository / name) for name in ("datasets", "maml")), "<frozen")
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    ]
    return f"{kind} ({places[-1]})" if places else kind
