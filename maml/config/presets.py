"""Presets: values of `Config`, one per row of a published table, each naming its source."""

import difflib
import shlex
from collections.abc import Mapping
from typing import Any

from maml.config import Config, flag, settings
from maml.config.fields import with_values
from maml.config.rows import ROWS
from maml.config.rows.deviations import deviations

__all__ = [
    "PRESETS",
    "changed",
    "describe",
    "experiment",
    "hint",
    "published_row",
    "spelled",
    "title",
    "with_values",
]

PRESETS: dict[str, Config] = {config.preset: config for config in ROWS}
"""By name."""


def describe() -> str:
    """Return one line per preset: its name, its published accuracy, its source and claim."""
    width = max(map(len, PRESETS))
    lines = []
    for name, config in PRESETS.items():
        published = f"{100 * config.published:.1f} %" if config.published is not None else ""
        claim = f": {config.claim}" if config.claim else ""
        lines.append(f"  {name:<{width}}  {published:>7}  {config.source}{claim}")
    return "\n".join(lines)


def changed(config: Config) -> dict[str, Any]:
    """Return the fields, and their values, that make another experiment of a preset.

    The seed is not one of them: with another, it is the same experiment once more.
    """
    preset = PRESETS.get(config.preset, Config())
    return {
        name: getattr(config, name)
        for name in settings(config)
        if name != "seed" and getattr(config, name) != getattr(preset, name)
    }


OF_THE_ROW = ("learner", "data", "ways", "shots")
"""What a row of a published table is about. With another value a run is not of that row."""


def _other_row(config: Config) -> dict[str, Any]:
    values = changed(config)
    return {name: values[name] for name in OF_THE_ROW if name in values}


def title(config: Config) -> str:
    """Return what a run is called: its preset, and the flags that make it of another row."""
    return _with(config.preset, _other_row(config))


def experiment(config: Config) -> str:
    """Return the preset and all flags that make another experiment of it."""
    return _with(config.preset, changed(config))


def _with(preset: str, values: dict[str, Any]) -> str:
    return f"{preset} with {spelled(values)}" if values else preset


def spelled(values: Mapping[str, Any]) -> str:
    """Return fields as flags on a command line."""
    return " ".join(
        (flag(name) if value else flag(f"no_{name}"))
        if isinstance(value, bool)
        else f"{flag(name)} {shlex.quote(str(value))}"
        for name, value in values.items()
    )


def published_row(config: Config) -> dict[str, Any]:
    """Return ``published``, ``claim``, ``source`` and ``deviations`` of the preset's row.

    ``deviations`` are sentences: what differs from the published experiment. A run that is of
    another row than its preset's has none, and the other values are None.
    """
    of_row = not _other_row(config)
    return {
        "published": config.published if of_row else None,
        "claim": (config.claim or None) if of_row else None,
        "source": config.source if of_row else None,
        "deviations": deviations(config.preset) if of_row else [],
    }


def hint(name: str) -> str:
    """Return what to do about a preset's name that there is not."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    other = f"did you mean {near[0]}? " if near else ""
    return (
        f"{other}--presets lists them all; any other experiment is a preset with flags, as in "
        "maml-omniglot-5way-1shot --learner anil --data folder --ways 3"
    )
