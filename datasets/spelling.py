"""How a flag spells a component of a user's own: ``module:attribute``, which may be called.

``my_file:MyNet(width=32, norm="group")`` is ``MyNet`` of ``my_file.py`` with two arguments of its
own, which are Python's literals. They are part of the name, so whatever tells apart or keeps what a
flag is given does so for them.
"""

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
    """The parts of a name that :func:`is_theirs`, or :class:`DataError`."""
    what = f"{flag} {' '.join(spelled.split())}"
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
        arguments = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
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
