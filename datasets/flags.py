"""Flags: the fields of the configuration, each with its facts.

A component's own flags are a class ``Flags`` at the top level of its file::

    class Flags:
        context: int = flag(100, "Size of the context, which is all that adapts.", least=1)

The class is read as text (:mod:`datasets.components`). All components of the file read these flags.
A flag that components of several files read is in ``maml.config.fields``.
"""

import ast
import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

MOST = 2**31 - 1
"""The limit of integer flags: a larger one overflows some library's int32, far from the flag."""


class Role(enum.Enum):
    """What depends on a field's value."""

    SAME_RUN = "a resumed run must share it with its beginning to be the same run"
    RESULT = "a result depends on it, too; a resumed run may have it otherwise"
    WAY = "how it is computed or written down: no result depends on it"
    HOST = "what a host has, or rank 0 alone reads: may differ between processes"


SAME_RUN, RESULT, WAY, HOST = Role


@dataclass(frozen=True)
class FieldFacts:
    """Facts of a field."""

    group: str = ""  # its heading in --help; "" if the field is no flag
    role: Role = WAY
    help: str = ""
    least: float | None = None  # the lowest value that is allowed
    above: float | None = None  # the value must exceed this
    below: float | None = None
    most: float | None = None
    # ("field", "value", …): the flag has an effect only if that field has one of these values.
    # Components declare in their own facts which flags they read.
    read_with: tuple[str, ...] | None = None
    chooses: bool = False  # validations depend on it, and so does the choice of the best model


_KEY = "facts"


def flag(default: Any, help: str, role: Role = SAME_RUN, **facts: Any) -> Any:
    """Return a dataclass field with `FieldFacts`; a callable default is a default factory."""
    metadata = {_KEY: FieldFacts(role=role, help=help, **facts)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(config: Any) -> dict[str, FieldFacts]:
    """Return the facts of each field of a configuration, or of its class, in order."""
    return {each.name: each.metadata.get(_KEY, FieldFacts()) for each in dataclasses.fields(config)}


OwnFlag: TypeAlias = tuple[str, Callable[..., Any]]
"""A component's own flag: its type as text, and `flag` with the component's arguments."""


def own_flags(tree: ast.Module) -> dict[str, OwnFlag]:
    """Return the flags that a file's class ``Flags`` declares, by name."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    lines = (line for each in classes if each.name == "Flags" for line in each.body)
    found: dict[str, OwnFlag] = {}
    for line in lines:
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
            facts = {fact.arg or "": _value(fact.value) for fact in line.value.keywords}
            declare = partial(flag, *map(_value, line.value.args), **facts)
            found[ast.unparse(line.target)] = (ast.unparse(line.annotation), declare)
    return found


def _value(node: ast.expr) -> Any:
    """Return the value of an argument of `flag`: a literal, or the `Role` with that name."""
    return Role[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
