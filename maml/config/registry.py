"""Which learners, networks, data sets and strategies there are, and what they say of themselves.

A component's facts are in its own file (`datasets.components`) and are read without importing it.
A user's own (`datasets.theirs`) is imported: it has the facts of the class that it derives from,
and may read any field.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import registry as of_data
from datasets.components import Component as Component
from datasets.components import is_theirs, named, scan
from datasets.registry import DataSet as DataSet
from datasets.theirs import calling as calling
from datasets.theirs import files_of, load_theirs

MAML = Path(__file__).parents[1]


@dataclass(frozen=True)
class LearnerFacts(Component):
    """A learner's facts."""

    # What it learns from: few-shot tasks, mini-batches of labelled examples, or acting.
    tasks: Literal["episodes", "batches", "environments"] = "episodes"
    strategy: str = "rpc"  # where its tasks run under torchrun, if --strategy does not say
    adapts: str = "*"  # what adapts unless --adapt says it (maml.learners.adapting)
    adapts_at_test: bool = True  # whether it takes inner steps at test


@dataclass(frozen=True)
class NetworkFacts(Component):
    """A network's facts."""

    GIVEN = 2

    # Images, or points of a function; None: whatever comes, as of a user's own.
    takes: Literal["images", "points"] | None = "images"
    # What its factory is called with beside image shape, ways and the fields it reads.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StrategyFacts(Component):
    """A strategy's facts; it is called with the configuration, the world and the worker."""

    GIVEN = 3


KINDS: dict[str, type[Component]] = {
    "learner": LearnerFacts,
    "network": NetworkFacts,
    "data": DataSet,
    "strategy": StrategyFacts,
}
"""The fields whose values are components' names."""

_FOLDERS = {"learner": "learners", "network": "networks", "strategy": "strategies"}
"""Where each kind is: in this folder of ``maml``, and in one of that name in any room."""


@functools.cache
def known(kind: str) -> Mapping[str, Any]:
    """Return the components of a kind, which is a key of `KINDS`, by name."""
    if kind == "data":
        return of_data.data_sets()
    folders = [MAML / _FOLDERS[kind], *MAML.glob(f"*/{_FOLDERS[kind]}")]
    return scan(folders, MAML.parent, KINDS[kind])


@functools.lru_cache(maxsize=None, typed=True)  # what a file has said is another name
def find(kind: str, name: str) -> Any:
    """Return a component's facts; a `UserError` names the flag, or the file that alone says it.

    A user's own has the facts of the first base class that has some.
    """
    if kind == "data":
        return of_data.find(name)
    if not is_theirs(name):
        return named(f"--{kind}", name, known(kind))
    parts, loaded = load_theirs(f"--{kind}", name, KINDS[kind].GIVEN)
    if kind == "network":
        # A subclass of one of ours too is called with (image_shape, ways) alone.
        return NetworkFacts(name, *parts, reads=(), takes=None)
    # When several names share a class, the first is the plain class.
    plain = reversed(list(known(kind).values()))
    of_base = {(other.module, other.attribute): other for other in plain}
    for base in getattr(loaded, "__mro__", ()):
        if found := of_base.get((base.__module__, base.__name__)):
            return dataclasses.replace(found, name=name, **parts._asdict(), reads=None)
    return KINDS[kind](name, *parts, reads=None)


def readers(kind: str, field: str) -> list[str]:
    """Return the names of the components of a kind that read a field of the configuration."""
    return [each.name for each in known(kind).values() if field in (each.reads or ())]


learner: Callable[[str], LearnerFacts] = functools.partial(find, "learner")
network: Callable[[str], NetworkFacts] = functools.partial(find, "network")
data_set: Callable[[str], DataSet] = functools.partial(find, "data")


def files_of_own(config: Any) -> dict[str, dict[str, str]]:
    """Return the files of a user's own components that results depend on, by kind and module."""
    # No result depends on the strategy.
    return {
        kind: files_of(find(kind, name))
        for kind, name in theirs(config).items()
        if kind != "strategy"
    }


def theirs(config: Any) -> dict[str, str]:
    """Return the components of a user's own that a configuration names, by kind."""
    chosen = {kind: getattr(config, kind) for kind in KINDS}
    return {kind: name for kind, name in chosen.items() if is_theirs(name)}


def import_theirs(config: Any) -> None:
    """Import the components of a user's own that a configuration names; raises as `find`."""
    for kind, name in theirs(config).items():
        find(kind, name)
