"""What goes wrong in a user's own component, as one line: who raised it, what, and where.

Nothing here imports torch.
"""

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from datasets.components import Component
from datasets.errors import DataError


@contextlib.contextmanager
def calling(
    components: Mapping[str, Component], passing: type[Exception] = DataError
) -> Iterator[None]:
    """Turn what a user's own component raises inside into a :class:`DataError` of one line.

    ``components`` are those at work, by flag. :class:`DataError` and ``passing`` are one line
    already; where all components are ours, errors are faults of this program. These pass through.
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
        files = set().union(*map(_files, blamed.values()))
        raise DataError(f"{names}: {described(error, files)}") from error


def _where_it_happened(
    error: BaseException, components: Mapping[str, Component]
) -> dict[str, Component]:
    """The component in whose file the error arose; several, if that cannot be told."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if here := {flag: c for flag, c in components.items() if _is_in(file, _files(c))}:
            return here
    return {}


def files_of(component: Component) -> dict[str, str]:
    """The files of a user's component that is loaded, by module: where it is named, and defined."""
    loaded = getattr(sys.modules.get(component.module), component.attribute, None)
    modules = {component.module, getattr(loaded, "__module__", component.module)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    return {name: file for name, file in files.items() if file}


def _files(component: Component) -> set[str]:
    """Those files, or the package that one is."""
    return {file.removesuffix("__init__.py") for file in files_of(component).values()}


def _is_in(file: str, places: Collection[str]) -> bool:
    """Whether a file is one of ``places``, or in a folder that is, which ends with ``/``."""
    return any(file == each or (each[-1:] == "/" and file.startswith(each)) for each in places)


def described(error: BaseException, files: Collection[str] = ()) -> str:
    """An exception in one line: what it says, its last place in ``files``, and its notes."""
    text = " ".join(str(error).split())
    line = type(error).__name__ + (f": {text}" if text else "")
    places = places_of_theirs(error, files)
    if places and not isinstance(error, SyntaxError):  # its text names the file
        line += f" ({places[-1]})"
    notes = (" ".join(note.split()) for note in getattr(error, "__notes__", ()))
    return "; ".join([line, *notes])


def places_of_theirs(error: BaseException, files: Collection[str] = ()) -> list[str]:
    """The places in ``files`` that an exception passed, as ``file:line``, the innermost at the end.

    Without one of these, those that are neither a library's nor ours.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if _is_in(frame.filename, files)]
    places = places or [frame for frame in frames if not _is_library(frame.filename)]
    return [f"{frame.filename}:{frame.lineno}" for frame in places]


def _is_library(file: str) -> bool:
    """Whether a file is of Python, of an installed package, of torch, or of this project."""
    if file.startswith("<") or {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return True
    repository = Path(__file__).parents[1]
    folders = [
        *(sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(str(repository / name) for name in ("datasets", "maml")),
        # It may have been built where it lies.
        *getattr(sys.modules.get("torch"), "__path__", ()),
    ]
    return _is_in(file, [f"{folder}/" for folder in folders])
