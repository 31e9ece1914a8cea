"""How a flag spells a component of a user's own: ``module:attribute``, which may be called.

``my_file:MyNet(width=32, norm="group")`` is ``MyNet`` of ``my_file.py`` with two arguments of its
own. Arguments are given by name, and are Python's literals: numbers, texts, True, False, None, and
tuples, lists, dictionaries and sets of these. They are part of the name, so whatever tells apart or
keeps what a flag is given does so for them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from datasets.errors import DataError


class Spelled(NamedTuple):
    """What a user's own is called: its module, its name there, and its arguments by name."""

    module: str
    attribute: str
    arguments: Mapping[str, Any]


def is_theirs(spelled: str) -> bool:
    """Whether a name means something in a user's own file."""
    return ":" in spelled.partition("(")[0]


def read(flag: str, spelled: str) -> Spelled:
    """The parts of a name that :func:`is_theirs`.

    Raises :class:`DataError`, in one line that begins with ``flag`` and ``spelled``, if it is no
    such name.
    """
    what = f"{flag} {' '.join(spelled.split())}"
    plain, bracket, rest = spelled.partition("(")
    module, _, attribute = plain.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise DataError(f"{what}: write module:attribute, as in my_file:MyClass")
    if not bracket:
        return Spelled(module, attribute, {})
    as_in = "write module:attribute(name=value), as in my_file:MyClass(width=32)"
    try:
        call = ast.parse(f"{attribute}({rest}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise DataError(f"{what}: Python cannot read this call: {reason}; {as_in}") from error
    if len(spelled.splitlines()) > 1 or not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    ):
        raise DataError(f"{what}: is not one call in one line; {as_in}")
    if call.args:
        raise DataError(f"{what}: the value {ast.unparse(call.args[0])} has no name; {as_in}")
    arguments = {}
    for keyword in call.keywords:
        value = ast.unparse(keyword.value)
        if keyword.arg is None:
            raise DataError(f"{what}: **{value} is no argument with a name; {as_in}")
        if keyword.arg in arguments:
            raise DataError(f"{what}: {keyword.arg} is given twice")
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise DataError(
                f"{what}: {keyword.arg}={value}: the value must be a number, a text in quotes, "
                "True, False, None, or a list, tuple, dictionary or set of these"
            ) from error
    return Spelled(module, attribute, arguments)
