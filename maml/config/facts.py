"""What a field of the configuration says of itself, from which flags and checks are derived."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """Facts of a field.

    Attributes:
        group: Its heading in ``--help``; "" for what is no flag.
        role: What else depends on it.
        help: For ``--help``.
        least: The least value that it may have.
        above: What its value must exceed.
        below: What its value must stay below.
        most: The greatest value that it may have.
        names: Whether its values are names of components, of the kind that is called as it is.
        read_with: ``(field, value)``: it has an effect only where that field has that value. Which
            component reads it is said by the component.
    """

    group: str = ""
    role: Role = WAY
    help: str = ""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    names: bool = False
    read_with: tuple[str, str] | None = None


_KEY = "facts"


def group(title: str) -> Callable[..., Any]:
    """Return what declares the fields of one group: ``default, role, help, fact=…``.

    A default that is a function is called for each configuration.
    """

    def declare(default: Any, role: Role, help: str, **facts: Any) -> Any:
        metadata = {_KEY: FieldFacts(group=title, role=role, help=help, **facts)}
        if callable(default):
            return dataclasses.field(default_factory=default, metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    return declare


def facts_of(config: Any) -> dict[str, FieldFacts]:
    """Return the facts of each field of a configuration, or of its class, in order."""
    return {each.name: each.metadata.get(_KEY, FieldFacts()) for each in dataclasses.fields(config)}
