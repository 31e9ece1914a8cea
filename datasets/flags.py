"""Flags: the fields of the configuration, each with what it says of itself.

A component's own flags are a class ``Flags`` at the top level of its file::

    class Flags:
        context: int = flag(100, "Numbers of the context, which alone adapts.", least=1)

It is read as text (:mod:`datasets.components`), and every component of the file reads these flags.
What components of several files read is in ``maml.config.fields``.
"""

import ast
import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MOST = 2**31 - 1
"""What is counted is at most this: beyond, some library's int32 overflows, far from the flag."""


class Role(enum.Enum):
    """What else depends on a field's value."""

    SAME_RUN = "a resumed run must share it with its beginning to be the same run"
    RESULT = "a result depends on it, too; a resumed run may have it otherwise"
    WAY = "how it is computed or written down: no result depends on it"
    HOST = "what a host has, or rank 0 alone reads: may differ between processes"


SAME_RUN, RESULT, WAY, HOST = Role


@dataclass(frozen=True)
class FieldFacts:
    """Facts of a field."""

    group: str = ""  # its heading in --help; "" for what is no flag
    role: Role = WAY
    help: str = ""
    least: float | None = None  # its value may be as low as this,
    above: float | None = None  # or must exceed this
    below: float | None = None
    most: float | None = None
    names: bool = False  # its values are names of components, of the kind that is called as it is
    # ("field", "value", …): it has an effect only where that field has one of these values. Which
    # component reads it is said by the component.
    read_with: tuple[str, ...] | None = None
    chooses: bool = False  # validations, and so the model that validated best, depend on it


_KEY = "facts"


def flag(default: Any, help: str, role: Role = SAME_RUN, **facts: Any) -> Any:
    """Return a dataclass field with `FieldFacts`; a default that is a function is called."""
    metadata = {_KEY: FieldFacts(role=role, help=help, **facts)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(config: Any) -> dict[str, FieldFacts]:
    """Return the facts of each field of a configuration, or of its class, in order."""
    return {each.name: each.metadata.get(_KEY, FieldFacts()) for each in dataclasses.fields(config)}


class OwnFlag(NamedTuple):
    """A component's own flag: its type, and what `flag` is called with."""

    type: Any
    arguments: list[Any]
    facts: dict[str, Any]


def own_flags(tree: ast.Module) -> dict[str, OwnFlag]:
    """Return the flags that a file's class ``Flags`` declares, by name."""
    lines = [
        line
        for statement in tree.body
        if isinstance(statement, ast.ClassDef) and statement.name == "Flags"
        for line in statement.body
    ]
    return {
        line.target.id: OwnFlag(
            _type(line.annotation),
            [_value(node) for node in line.value.args],
            {fact.arg: _value(fact.value) for fact in line.value.keywords if fact.arg},
        )
        for line in lines
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(line.value, ast.Call)
    }


def _type(node: ast.expr) -> Any:
    """Return what an annotation means: a type, one or None, or a `Literal`."""
    if isinstance(node, ast.BinOp):
        return _type(node.left) | None
    if isinstance(node, ast.Subscript):
        return Literal[ast.literal_eval(node.slice)]
    return {"bool": bool, "int": int, "float": float, "str": str}[ast.unparse(node)]


def _value(node: ast.expr) -> Any:
    """Return what an argument of `flag` means: a literal, or the name of a `Role`."""
    return Role[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
