"""The available learners, networks, data sets and strategies, and their facts.

A component's facts are in its own file (`datasets.components`) and are read without importing it.
A user's own component (`datasets.theirs`) is imported. `find` returns its facts.
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

    # It learns from few-shot tasks, mini-batches of labelled examples, or environments to act in.
    tasks: Literal["episodes", "batches", "environments"] = "episodes"
    strategy: str = "rpc"  # its strategy under torchrun with --strategy auto
    adapts: str = "*"  # the parameters that adapt without --adapt (maml.learners.adapting)
    adapts_at_test: bool = True  # whether it takes inner steps at test


@dataclass(frozen=True)
class NetworkFacts(Component):
    """A network's facts."""

    GIVEN = 2

    # Its inputs: images, or points of a function. None: any inputs, as for a user's own network.
    takes: Literal["images", "points"] | None = "images"
    # Arguments of its factory in addition to image shape, ways and the fields that it reads.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StrategyFacts(Component):
    """A strategy's facts. The program gives it the configuration, the world and the worker."""

    GIVEN = 3


KINDS: dict[str, type[Component]] = {
    "learner": LearnerFacts,
    "network": NetworkFacts,
    "data": DataSet,
    "strategy": StrategyFacts,
}
"""The fields whose values name components, with the class of the components' facts."""

_FOLDERS = {"learner": "learners", "network": "networks", "strategy": "strategies"}
"""The folder of each kind, directly in ``maml`` or in a subfolder of ``maml``."""


@functools.cache
def known(kind: str) -> Mapping[str, Any]:
    """Return the components of a kind (a key of `KINDS`), by name."""
    if kind == "data":
        return of_data.data_sets()
    folders = [MAML / _FOLDERS[kind], *MAML.glob(f"*/{_FOLDERS[kind]}")]
    return scan(folders, MAML.parent, KINDS[kind])


@functools.lru_cache(maxsize=None, typed=True)  # a `FromFile` is another key than an equal str
def find(kind: str, name: str) -> Any:
    """Return a component's facts. A `UserError` names the flag, or the file with an untrusted name.

    A user's own learner or strategy has the facts of its first base class with facts, but it may
    read any field.
    """
    if kind == "data":
        return of_data.find(name)
    if not is_theirs(name):
        return named(f"--{kind}", name, known(kind))
    parts, loaded = load_theirs(f"--{kind}", name, KINDS[kind].GIVEN)
    if kind == "network":
        # We call it with only (image_shape, ways), even if it derives from a network of ours.
        return NetworkFacts(name, *parts, reads=(), takes=None)
    # When several names share a class, the first is the plain class.
    plain = reversed(list(known(kind).values()))
    of_base = {(other.module, other.attribute): other for other in plain}
    for base in getattr(loaded, "__mro__", ()):
        if facts := of_base.get((base.__module__, base.__name__)):
            return dataclasses.replace(facts, name=name, **parts._asdict(), reads=None)
    return KINDS[kind](name, *parts, reads=None)


def readers(kind: str, field: str) -> list[str]:
    """Return the names of the components of a kind that read a field of the configuration."""
    return [name for name, facts in known(kind).items() if field in (facts.reads or ())]


def is_read(field: str, config: Any) -> bool:
    """Return whether a field may have an effect with the components of ``config``."""
    kinds = {kind: getattr(config, kind) for kind in KINDS if readers(kind, field)}
    # A user's own component may read any field.
    return all(is_theirs(name) or field in find(kind, name).reads for kind, name in kinds.items())


learner: Callable[[str], LearnerFacts] = functools.partial(find, "learner")
network: Callable[[str], NetworkFacts] = functools.partial(find, "network")
data_set: Callable[[str], DataSet] = functools.partial(find, "data")


def files_of_own(config: Any) -> dict[str, dict[str, str]]:
    """Return the files of a user's own components that results depend on, by kind and module."""
    # No result depends on the strategy.
    named = {kind: name for kind, name in theirs(config).items() if kind != "strategy"}
    return {kind: files_of(find(kind, name)) for kind, name in named.items()}


def theirs(config: Any) -> dict[str, str]:
    """Return the names of a user's own components in a configuration, by kind."""
    return {kind: name for kind in KINDS if is_theirs(name := getattr(config, kind))}


def import_theirs(config: Any) -> None:
    """Import a user's own components that a configuration names. Raise what `find` raises."""
    for kind, name in theirs(config).items():
        find(kind, name)
