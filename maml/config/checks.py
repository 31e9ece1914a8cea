"""Check a configuration's values, each and together. A bad value ends in a one-line `UserError`.

The facts of a field or a component hold its own rules. A rule for several flags is the ``check`` of
the class that declares them (`maml.config.flags`). This module holds the rules for components.
"""

import math
import os

from datasets.components import is_theirs
from maml.config import registry
from maml.config.fields import FACTS, Config, flag
from maml.config.flags import MOST
from maml.errors import UserError


def most_threads() -> int:
    """Return the allowed number of computing threads. With more, OpenMP crashes or crawls here."""
    return 8 * (os.cpu_count() or 1)


def check(config: Config, preset: Config | None = None) -> None:
    """Raise a `UserError` that names the first flag that cannot work here or has no effect.

    ``preset`` is the configuration that the flags change. Its own values may have no effect.
    """
    check_values(config)
    if config.threads is not None and config.threads > most_threads():
        raise UserError(
            f"--threads must be at most {most_threads()}, 8 for each core of this machine, "
            f"not {config.threads}"
        )
    if preset is not None:
        _check_read(config, preset)


def check_values(config: Config, *, own: bool = True) -> None:
    """Raise a `UserError` that names the first flag whose value cannot work on any machine.

    Without ``own``, a user's own components are not imported. If the configuration names one, each
    value is checked separately, because the rules for several depend on the component's facts.
    """
    for name, facts in FACTS.items():
        value = getattr(config, name)
        if facts.group and value == "":
            raise UserError(f'{flag(name)} "": empty; was a shell variable not set?')
        if name in registry.KINDS:
            if own or not is_theirs(value):
                registry.find(name, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            check_bounds(name, value)
    if own or not registry.theirs(config):
        _check_components(config)
        for owner in reversed(Config.__mro__):
            if check_flags := vars(owner).get("check"):
                check_flags(config)


def check_bounds(name: str, value: float) -> None:
    """Raise `UserError` for a number that its field does not allow."""
    facts = FACTS[name]
    most = MOST if facts.most is None and isinstance(value, int) else facts.most
    # `not a < b` instead of `a >= b`, because nan must fail, too.
    if facts.above is not None and not facts.above < value < math.inf:
        raise UserError(f"{flag(name)} must be positive and finite, not {value}")
    if facts.least is not None and not facts.least <= value < math.inf:
        finite = " and finite" if isinstance(value, float) else ""
        raise UserError(f"{flag(name)} must be at least {facts.least}{finite}, not {value}")
    if facts.below is not None and not value < facts.below:
        raise UserError(f"{flag(name)} must be below {facts.below}, not {value}")
    if most is not None and value > most:
        raise UserError(f"{flag(name)} must be at most {most}, not {value}")


def _check_read(config: Config, preset: Config) -> None:
    """Raise `UserError` for a value that differs from the preset's but has no effect here."""
    given = {name: it for name, it in vars(config).items() if it != getattr(preset, name)}
    for kind in registry.KINDS:
        chosen = registry.find(kind, getattr(config, kind))
        for name, value in given.items():
            if chosen.reads is None or name in chosen.reads:
                continue
            said, component = f"{flag(name)} {value}", f"{flag(kind)} {chosen.name}"
            if name in chosen.ignores:
                raise UserError(f"{said}: {component} {chosen.ignores[name]}")
            if readers := registry.readers(kind, name):
                raise UserError(f"{said} is not for {component}, but for {', '.join(readers)}")
    for name in given:
        check_read_with(config, name)


def check_read_with(config: Config, name: str) -> None:
    """Raise `UserError` if a field's value has no effect without another value of another field."""
    with_field, *needed = FACTS[name].read_with or ("",)
    if needed and getattr(config, with_field) not in needed:
        raise UserError(
            f"{flag(name)} {getattr(config, name)} is for {flag(with_field)} "
            f"{' or '.join(map(str, needed))}, not {getattr(config, with_field)}"
        )


def _check_components(config: Config) -> None:
    """Raise `UserError` for a value that a component refuses, and for components that clash."""
    for kind in registry.KINDS:
        chosen = registry.find(kind, getattr(config, kind))
        for name, refused in chosen.refuses.items():
            value = getattr(config, name)
            if value in refused:
                raise UserError(
                    f"{flag(name)} {value}: {flag(kind)} {chosen.name} {refused[value]}"
                )
    learner, data = registry.learner(config.learner), registry.data_set(config.data)
    network = registry.network(config.network)
    if learner.tasks not in data.tasks:
        known = registry.known("learner").values()
        others = [other.name for other in known if other.tasks in data.tasks]
        raise UserError(
            f"--data {data.name}: has no {_TASKS[learner.tasks]}, which --learner {learner.name} "
            f"learns from; it is for --learner {', '.join(others)}"
        )
    points = not data.is_theirs and data.image_shape is None
    if not data.is_theirs and network.takes not in (None, "points" if points else "images"):
        raise UserError(f"--network {network.name} cannot learn --data {data.name}")


_TASKS = {
    "episodes": "few-shot tasks",
    "batches": "examples of classes known in training",
    "environments": "environments to act in",
}
