"""Flags: fields of dataclasses, each with its facts; the text below a field is its help.

`maml.config.learning` and `maml.config.running` hold a class for each heading of ``--help``, and
`maml.config.Config` derives from them all. The method ``check`` of a class raises a `UserError` for
values that cannot work together; `maml.config.checks` calls the method of each class. A class
derives from the owners of other fields that it checks.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

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

    role: Role = WAY
    least: float | None = None  # the lowest value that is allowed
    above: float | None = None  # the value must exceed this
    below: float | None = None
    most: float | None = None
    # ("field", value, …): the flag has an effect only if that field has one of these values.
    # Components declare in their own facts which flags they read.
    read_with: tuple[Any, ...] | None = None
    chooses: bool = False  # validations depend on it, and so does the choice of the best model
    # What follows is from the field's class, annotation and text.
    help: str = ""
    group: str = ""  # its heading in --help; "" if the field is no flag
    type: Any = str
    optional: bool = False  # it may be None
    choices: tuple[str, ...] = ()  # all its values, if they are few texts


T = TypeVar("T", bound=str | float | None)


def flag(default: T | Callable[[], T], role: Role = SAME_RUN, **facts: Any) -> T:
    """Return a dataclass field with `FieldFacts`; a callable default is a default factory."""
    given: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**given, metadata={"facts": FieldFacts(role, **facts)})


def facts_of(config: type) -> dict[str, FieldFacts]:
    """Return the facts of each field of a dataclass, in order. `OuterLoop` is "outer loop"."""
    # The last class that has a field is the one that declares it.
    owners = {f.name: of for of in config.__mro__[:-1] for f in dataclasses.fields(of)}
    types, by_name = get_type_hints(config), {}
    for field in dataclasses.fields(config):
        facts, type_ = field.metadata.get("facts"), types[field.name]
        of_type: dict[str, Any] = {}
        if facts:
            owner = owners[field.name]
            of_type["group"] = re.sub("(?<=.)([A-Z])", r" \1", owner.__name__).lower()
            of_type["help"] = _texts(owner.__module__)[field.name]
        if get_origin(type_) is Literal:
            of_type["choices"] = get_args(type_)
        else:
            of_type["type"] = next(iter(get_args(type_)), type_)
            of_type["optional"] = of_type["type"] is not type_
        by_name[field.name] = dataclasses.replace(facts or FieldFacts(), **of_type)
    return by_name


@functools.cache
def _texts(module: str) -> dict[str, str]:
    """Return the text below each field of the classes in a module. Only the source has it."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    bodies = [each.body for each in tree.body if isinstance(each, ast.ClassDef)]
    return {
        ast.unparse(field.target): " ".join(str(text.value.value).split())
        for field, text in itertools.chain.from_iterable(map(itertools.pairwise, bodies))
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
