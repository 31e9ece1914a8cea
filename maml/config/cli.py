"""The command line: ``PRESET --flag value …`` to a `Config`, with one-line errors."""

from __future__ import annotations

from collections.abc import Sequence

from maml.config import Config, user_path
from maml.config.checks import check
from maml.config.parser import Parser, add_fields
from maml.config.presets import PRESETS, describe, hint, with_values
from maml.errors import UserError

USAGE = "train_maml.py PRESET"


def parse(arguments: Sequence[str]) -> Config:
    """Turn ``PRESET --flag value …`` into a checked `Config`.

    ``data_root`` is absolute then: config.yaml keeps it, for an evaluation from another folder.

    Raises:
        UserError: for an unknown preset, an unknown flag or a value that cannot work.
        SystemExit: with code 0 after ``--help``.
    """
    if not arguments:
        raise UserError("no PRESET given; `train_maml.py --help` lists them all")
    name, *flags = arguments
    if name in ("-h", "--help"):
        name, flags = "maml-glyphs-5way-1shot", ["--help"]
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: {hint(name)}")
    given = vars(_parser(PRESETS[name]).parse_args(list(map(_with_hyphens, flags))))
    config = with_values(PRESETS[name], **given)
    check(config, PRESETS[name])
    data_root = user_path("data_root", config.data_root).absolute()
    return with_values(config, data_root=str(data_root))


def _parser(default: Config) -> Parser:
    parser = Parser(
        prog=USAGE,
        usage="%(prog)s [--flag value …]",
        description=f"{Config.__doc__}\n\npresets (published accuracy, source):\n{describe()}",
    )
    add_fields(parser, default)
    return parser


def _with_hyphens(word: str) -> str:
    """Return a flag as it is spelled here: ``--inner_lr`` is ``--inner-lr``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
