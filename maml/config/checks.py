"""Check a configuration's values, each and together. A bad value ends in a one-line `UserError`.

The facts of a field or a component hold its own rules. This module holds the rules for several.
"""

import math
import os

from datasets.components import is_theirs
from datasets.flags import MOST
from maml.config import registry
from maml.config.fields import FACTS, Config, flag
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
        _check_combinations(config)


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
            readers = registry.readers(kind, name)
            if readers and chosen.reads is not None and name not in chosen.reads:
                raise UserError(
                    f"{flag(name)} {value} is not for {flag(kind)} {chosen.name}, but for "
                    f"{', '.join(readers)}"
                )
            if name in chosen.ignores:
                raise UserError(
                    f"{flag(name)} {value}: {flag(kind)} {chosen.name} {chosen.ignores[name]}"
                )
    for name, value in given.items():
        with_field, *needed = FACTS[name].read_with or ("",)
        if needed and getattr(config, with_field) not in needed:
            raise UserError(
                f"{flag(name)} {value} is for {flag(with_field)} {' or '.join(needed)}, not "
                f"{getattr(config, with_field)}"
            )
    if "iterations" in given and config.epochs is not None:
        raise UserError(
            f"--epochs {config.epochs} and --iterations {config.iterations}: each says how long to "
            "train; give one of them"
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
    openers = {
        "episodes": (data.episodes, "few-shot tasks"),
        "batches": (data.examples, "examples of classes known in training"),
        "environments": (
            data.environments or (data.episodes if data.is_theirs else None),
            "environments to act in",
        ),
    }
    opener, what = openers[learner.tasks]
    if opener is None:
        known = registry.known("learner").values()
        others = [other.name for other in known if openers[other.tasks][0] is not None]
        raise UserError(
            f"--data {data.name}: has no {what}, which --learner {learner.name} learns from; it is "
            f"for --learner {', '.join(others)}"
        )
    points = not data.is_theirs and data.image_shape is None
    if not data.is_theirs and network.takes not in (None, "points" if points else "images"):
        raise UserError(f"--network {network.name} cannot learn --data {data.name}")


def _check_combinations(config: Config) -> None:
    """Raise `UserError` for values that cannot work together."""
    if config.epochs is not None and registry.learner(config.learner).tasks != "batches":
        raise UserError(
            f"--epochs {config.epochs}: --learner {config.learner} learns from tasks, which never "
            "end; give --iterations"
        )
    data = registry.data_set(config.data)
    # We do not know whether the targets of a user's own data set are classes.
    if data.classifies and not data.environments and not data.is_theirs:
        for name in ("ways", "train_ways"):
            if getattr(config, name) == 1:
                raise UserError(
                    f"{flag(name)} 1: of one class, every answer is right; give 2 or more"
                )
    if config.test_model == "best" and config.test_tasks and not config.eval_every:
        raise UserError(
            "--eval-every 0: validates no model, so --test-model best has none to test; give "
            "--test-model last, too"
        )
    if config.keep_best and not config.eval_every:
        raise UserError(
            f"--eval-every 0: validates no model, so --keep-best {config.keep_best} has none to "
            "keep; give --keep-best 0, too"
        )
    reads = registry.learner(config.learner).reads
    keeps = config.keep_moment and config.inner_optimizer == "adam0"
    if keeps and (reads is None or "keep_moment" in reads):
        # Any other outer step would make the kept mean of squares negative or biased.
        steps = max(config.meta_lr, config.meta_lr_end)
        clips = config.grad_clip or config.grad_clip_norm
        if config.meta_optimizer != "sgd" or config.meta_momentum or steps > 1 or clips:
            raise UserError(
                "--keep-moment: its moves are weighted means, so it needs --meta-optimizer sgd "
                "without --meta-momentum and clipping, and --meta-lr 1 or less; or give "
                "--no-keep-moment"
            )
    if config.ps_transport == "collective":
        for name, only in (("ps_mode", "sync"), ("ps_forward", "local")):
            if getattr(config, name) != only:
                raise UserError(
                    f"{flag(name)} {getattr(config, name)} needs --ps-transport rpc: "
                    f"collectives serve {flag(name)} {only} alone"
                )
    if config.kernels == "native" and config.compile == "on":
        raise UserError("--compile on: with --kernels native nothing is left to compile")
