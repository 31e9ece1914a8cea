"""Presets: values of `Config`, one per row of a published table, each naming its source.

They are in ``rows/*.toml``. A section is a row, or several rows of one experiment: then the star in
its name stands for each key of ``rows``. The values of ``rows`` are the published numbers and their
intervals. Brackets give a number's kind, if it is not a single model's transductive accuracy.

A section builds on the sections in ``like``; by default, on its data's section. The first of them
gives a missing ``source`` or ``differs``. All of them give their flags, in order. The section's own
flags follow: ``all``, and those for a part of the row's name, as ``20way``. The name sets learner
(fomaml: maml, first order), data, ways and shots. ``differs``: differences from the published
experiment. It and ``source`` may have names from ``texts``, ``{ways}`` and ``{shots}`` in braces.
"""

import difflib
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maml.config.fields import FACTS, Config, flag, settings
from maml.config.fields import with_values as with_values
from maml.config.parser import Parser, add_fields

_FILES = ("released", "glyphs", "omniglot", "miniimagenet", "others")
_FEW_SHOT = re.compile(r"(?P<learner>\w+)-(?P<data>\w+)-(?P<ways>\d+)way-(?P<shots>\d+)shot.*")


PRESETS: dict[str, Config] = {}
"""All presets, by name."""
DEVIATIONS: dict[str, list[str]] = {}
"""Each difference from a published experiment, with the name patterns of its presets."""
_DIFFERS: dict[str, list[str]] = {}


def _sections() -> dict[str, dict[str, Any]]:
    """Return the sections of all files, with the values that they inherit by ``like``."""
    sections: dict[str, dict[str, Any]] = {}
    for file in _FILES:
        text = (Path(__file__).parent / "rows" / f"{file}.toml").read_text(encoding="utf-8")
        for name, content in tomllib.loads(text).items():
            data = [part for part in name.split("-")[1:2] if part in sections]
            above = [sections[other] for other in content.get("like", data)]
            flags = [flag for section in above for flag in section["flags"]]
            flags += content.get("flags", {}).items()
            taken = {"source": "", "differs": [], **(above[0] if above else {}), "rows": {"": ""}}
            sections[name] = taken | content | {"flags": flags}
    return sections


def _fill(sections: dict[str, dict[str, Any]]) -> None:
    """Fill `PRESETS`, `_DIFFERS` and `DEVIATIONS`."""
    parser = Parser()
    add_fields(parser, Config())
    texts = sections.pop("texts")
    for section, content in sections.items():
        for part, claim in content["rows"].items() if content["source"] else ():
            name = section.replace("*", part)
            words = " ".join(f for key, f in content["flags"] if key in ("all", *name.split("-")))
            said = match.groupdict() if (match := _FEW_SHOT.fullmatch(name)) else {}
            words += "".join(f" --{key} {value}" for key, value in said.items())
            words = words.replace("--learner fomaml", "--learner maml --order first")
            values = vars(parser.parse_args(words.split()))
            if claim:
                values |= {"claim": claim, "published": round(float(claim.split()[0]) / 100, 6)}
            source = content["source"].format_map(texts | said)
            PRESETS[name] = Config(preset=name, source=source, **values)
            differs = [" ".join(d.format_map(texts | said).split()) for d in content["differs"]]
            _DIFFERS[name] = differs
            for difference in differs:
                if section not in DEVIATIONS.setdefault(difference, []):
                    DEVIATIONS[difference].append(section)


_fill(_sections())


def describe() -> str:
    """Return one line per preset: its name, its published accuracy, its source and claim."""
    width, lines = max(map(len, PRESETS)), []
    for name, config in PRESETS.items():
        published = f"{100 * config.published:.1f} %" if config.published is not None else ""
        line = f"  {name:<{width}}  {published:>7}  {config.source}: {config.claim}"
        lines.append(line.removesuffix(": "))
    return "\n".join(lines)


def changed(config: Config) -> dict[str, Any]:
    """Return the settings, except the seed, that differ from the preset's: ``{field: value}``."""
    preset = PRESETS.get(config.preset, Config())
    return differing(config, preset, (name for name in settings(config) if name != "seed"))


def differing(config: Config, preset: Config, names: Iterable[str]) -> dict[str, Any]:
    """Return those fields among ``names`` whose flags turn ``preset`` into ``config``."""
    values = {n: getattr(config, n) for n in names if getattr(config, n) != getattr(preset, n)}
    if "inner_steps" in values:  # this flag alone would set the steps of tests, too
        values["eval_inner_steps"] = config.eval_inner_steps
    return values


_OF_A_ROW = ("learner", "data", "ways", "shots")
"""Another value of these fields moves a run to another row of a published table."""


def title(config: Config) -> str:
    """Return a run's title: its preset, and the flags that move it to another row."""
    return experiment(config, _OF_A_ROW)


def experiment(config: Config, among: Iterable[str] = FACTS) -> str:
    """Return the preset's name and those flags ``among`` all that change its experiment."""
    values = {name: value for name, value in changed(config).items() if name in among}
    return f"{config.preset} with {spelled(values)}" if values else config.preset


def spelled(values: Mapping[str, Any]) -> str:
    """Return fields as flags on a command line."""
    return " ".join(
        (flag(name) if value else flag(f"no_{name}"))
        if isinstance(value, bool)
        else f"{flag(name)} {shlex.quote('none' if value is None else str(value))}"
        for name, value in values.items()
    )


def published_row(config: Config) -> dict[str, Any]:
    """Return ``published``, ``claim``, ``source`` and ``deviations`` of the preset's row.

    ``deviations`` are sentences about differences from the published experiment. If the run belongs
    to another row than its preset, ``deviations`` is empty and the other values are None.
    """
    if changed(config).keys() & {*_OF_A_ROW}:
        return dict.fromkeys(("published", "claim", "source")) | {"deviations": []}
    return {
        "published": config.published,
        "claim": config.claim or None,
        "source": config.source,
        "deviations": _DIFFERS.get(config.preset, []),
    }


def hint(name: str) -> str:
    """Return advice for the name of a preset that does not exist."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    other = f"did you mean {near[0]}? " if near else ""
    return (
        f"{other}--presets lists them all; any other experiment is a preset with flags, as in "
        "maml-omniglot-5way-1shot --learner anil --data folder --ways 3"
    )
