"""Read and import the name of a user's own component, if it is trusted, and report its errors.

``my_file:MyNet(width=32, norm="group")`` is ``MyNet`` of ``my_file.py`` with two arguments, Python
literals. The arguments are part of the name, so code that saves or compares names includes them. A
name that a user types is trusted. A file (a run's config.yaml, a record) may come from anybody, so
a name from a file is a :class:`FromFile`, which is not imported. If the user trusts the file, the
caller turns the name into a plain ``str``. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from datasets.components import Component
from datasets.errors import DataError, UserError


class FromFile(str):
    """A component's name that comes only from a file; ``str()`` of the name is trusted."""

    said: str

    def __new__(cls, name: str, said: str) -> FromFile:
        """Make ``name``. ``said`` is a message that names the file and the user's code in it."""
        text = super().__new__(cls, name)
        text.said = said
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.said


class Spelled(NamedTuple):
    """The parts of a user's own name: a module, a name in the module, and arguments by name."""

    module: str
    attribute: str
    arguments: Mapping[str, Any]


def _read(flag: str, spelled: str) -> Spelled:
    """Return the parts of a name, or raise :class:`DataError`."""
    what = f"{flag} {spelled}"
    plain, bracket, rest = spelled.partition("(")
    module, _, attribute = plain.partition(":")
    if module.endswith(".py"):
        raise DataError(f"{what}: write {module.removesuffix('.py')}:{attribute}, without .py")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise DataError(f"{what}: write module:attribute, as in my_file:MyClass")
    if not bracket:
        return Spelled(module, attribute, {})
    reason = "is not one call, in one line, that gives plain values by name"
    try:
        call = ast.parse(f"{attribute}({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError(reason)
        arguments = {given.arg or "": ast.literal_eval(given.value) for given in call.keywords}
        if len(arguments) < len(call.keywords) or "" in arguments or "\n" in spelled:
            raise ValueError(reason)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        if isinstance(error, SyntaxError):
            reason = f"Python cannot read this call: {error.msg}"
        raise DataError(
            f"{what}: {reason}; write module:attribute(name=value), as in "
            'my_file:MyClass(width=32, norm="group"): values are numbers, texts in quotes, True, '
            "False, None, and lists, tuples, dictionaries and sets of these"
        ) from error
    return Spelled(module, attribute, arguments)


def load_theirs(flag: str, spelled: str, given: int) -> tuple[Spelled, Any]:
    """Import a user's own name, also from the current directory; return its parts and the object.

    ``given`` is the number of positional arguments that this program passes to the object. Raise a
    one-line :class:`DataError` that begins with ``flag`` and ``spelled``, or that names the file if
    the name comes only from a file.
    """
    if isinstance(spelled, FromFile):
        raise DataError(f"{spelled.said}; if you trust it, give --trust, or trust=True in Python")
    parts = _read(flag, spelled)
    module_name, attribute, arguments = parts

    def wrong(reason: str) -> DataError:
        return DataError(f"{flag} {spelled}: {reason}")

    if (package := module_name.partition(".")[0]) in sys.stdlib_module_names:
        raise wrong(f"{package} is a module of Python itself; give a file of yours another name")
    # As `python -m` does. If a program is started by its path, only its own folder is on sys.path.
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.insert(1, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module_name}.".startswith(f"{absent}."):
            reason = f"there is no module {absent} in {Path.cwd()} or on PYTHONPATH"
            raise wrong(reason) from error
        raise wrong(described(error)) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        file = getattr(module, "__file__", None) or "it has no file"
        raise wrong(f"module {module_name} ({file}) has no {attribute}{hint}")
    loaded = getattr(module, attribute)
    if mistake := _mistake(module_name, loaded, arguments, given):
        raise wrong(mistake)
    return parts, loaded


def _mistake(module: str, loaded: Any, arguments: Mapping[str, Any], given: int) -> str:
    """Say what is wrong with a loaded object or with the arguments of its name; "" if nothing."""
    plain = inspect.unwrap(loaded) if callable(loaded) else loaded
    if not isinstance(plain, (type, FunctionType)):
        return f"is no function or class, but {type(loaded).__name__}"
    where = str(plain.__module__)
    if where.partition(".")[0] != module.partition(".")[0]:
        return f"is defined in {where}, not in {module}: name it where it is defined"
    try:
        signature = inspect.signature(loaded)
    except ValueError as error:  # its constructor is written in C
        return str(error)
    by_program = list(signature.parameters)[: passed(signature, given)]
    if twice := sorted(arguments.keys() & {*by_program}):
        return f"{twice[0]} is given by this program: leave it out"
    try:
        signature.bind_partial(**arguments)
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""


def passed(signature: inspect.Signature, given: int) -> int:
    """Return how many of the ``given`` positional arguments to pass. A network's second is the
    number of outputs: a parameter with a default, as ``width=32``, takes it only by such a name.
    """
    for second in [*signature.parameters.values()][1:given][:1]:
        if second.default is not second.empty and not _OUTPUTS.search(second.name):
            return 1
    return given


_OUTPUTS = re.compile("(^|_)n?(ways?|class(es)?|out(puts?)?|labels?|targets?)(_|$)")


@contextlib.contextmanager
def calling(**components: Component) -> Iterator[None]:
    """Turn errors from a user's own component into a :class:`DataError`; ``components`` by kind.

    A `UserError`, which is one line already, passes through. If all components are ours, all do.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        theirs = {f"--{kind}": one for kind, one in components.items() if one.is_theirs}
        if not theirs:
            raise
        places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        here = ({f: c for f, c in theirs.items() if _is_in(at, _files(c))} for at in places[::-1])
        # The component whose file raised the error; several if they share the file, or all.
        blamed = next(filter(None, here), theirs)
        names = " or ".join(f"{flag} {component.name}" for flag, component in blamed.items())
        files = set().union(*map(_files, blamed.values()))
        raise DataError(f"{names}: {described(error, files)}") from error


def files_of(component: Component) -> dict[str, str]:
    """Return the files of a loaded user's component, by module: where it is named and defined."""
    loaded = getattr(sys.modules.get(component.module), component.attribute, None)
    modules = {component.module, getattr(loaded, "__module__", component.module)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    return {name: file for name, file in files.items() if file}


def _files(component: Component) -> set[str]:
    """Return the paths of :func:`files_of`; an ``__init__.py`` becomes the package's folder."""
    return {file.removesuffix("__init__.py") for file in files_of(component).values()}


def _is_in(file: str, places: Collection[str]) -> bool:
    """Return whether a file is one of ``places``, or in one that is a folder (ends in ``/``)."""
    return any(file == at or (at[-1:] == "/" and file.startswith(at)) for at in places)


def described(error: BaseException, files: Collection[str] = ()) -> str:
    """Return an exception in one line: its message, its last place in ``files``, and its notes."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}".removesuffix(": ")
    places = places_of_theirs(error, files)
    if places and not isinstance(error, SyntaxError):  # its text names the file
        line += f" ({places[-1]})"
    notes = (" ".join(note.split()) for note in getattr(error, "__notes__", ()))
    return "; ".join([line, *notes])


def places_of_theirs(error: BaseException, files: Collection[str] = ()) -> list[str]:
    """Return an exception's places, ``file:line``, in ``files``, or else outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if _is_in(frame.filename, files)]
    places = places or [frame for frame in frames if not _is_library(frame.filename)]
    return [f"{frame.filename}:{frame.lineno}" for frame in places]


def _is_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package, torch, or this project."""
    if file.startswith("<") or {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return True
    repository = Path(__file__).parents[1]
    folders = [
        *(sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(str(repository / name) for name in ("datasets", "maml")),
        # torch may be an in-place build, outside site-packages.
        *getattr(sys.modules.get("torch"), "__path__", ()),
    ]
    return _is_in(file, [f"{folder}/" for folder in folders])
