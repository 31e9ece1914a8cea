"""A component of a user's own, imported. Nothing here imports torch."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from datasets.blame import described
from datasets.errors import DataError
from datasets.spelling import Spelled, read
from datasets.trust import refusal


def load_theirs(flag: str, spelled: str, given: int) -> tuple[Spelled, Any]:
    """What a name in a user's own file means, and its parts; imported, also from this directory.

    ``given`` is with how many arguments, by position, this program calls what is meant. Raises
    :class:`DataError`, in one line that begins with ``flag`` and ``spelled``; or that names the
    file, if nobody but a file has said the name (:mod:`datasets.trust`).
    """
    if line := refusal(spelled):
        raise DataError(line)
    parts = read(flag, spelled)
    module_name, attribute, arguments = parts

    def wrong(reason: str) -> DataError:
        return DataError(f"{flag} {spelled}: {reason}")

    if (package := module_name.partition(".")[0]) in sys.stdlib_module_names:
        raise wrong(f"{package} is a module of Python itself; give a file of yours another name")
    # As `python -m` does; a program that is started by its path has its own folder there alone.
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
    if strange := _strange(module_name, loaded) or _wrong(loaded, arguments, given):
        raise wrong(strange)
    return parts, loaded


def _strange(module: str, loaded: Any) -> str:
    """Why what a module holds is no component of it, or its package; "" if it is one.

    What is imported from elsewhere is not meant: any function of Python is in most modules.
    """
    plain = inspect.unwrap(loaded) if callable(loaded) else loaded
    if not isinstance(plain, (type, FunctionType)):
        return f"is no function or class, but {type(loaded).__name__}"
    where = str(plain.__module__)
    if where.partition(".")[0] != module.partition(".")[0]:
        return f"is defined in {where}, not in {module}: name it where it is defined"
    return ""


def _wrong(loaded: Any, arguments: Mapping[str, Any], given: int) -> str:
    """What is wrong with the arguments of a name; "" if nothing is."""
    try:
        signature = inspect.signature(loaded)
    except ValueError as error:  # its constructor is written in C
        return str(error)
    if strange := sorted(set(arguments) & set(list(signature.parameters)[:given])):
        return f"{strange[0]} is given by this program: leave it out"
    try:
        signature.bind_partial(**arguments)
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""
