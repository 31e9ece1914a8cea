"""The command line: ``PRESET --flag value …`` to a `Config`, with one-line errors."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Sequence

import tyro

from maml.config import Config, user_path
from maml.config.checks import check
from maml.config.presets import PRESETS, describe, with_values
from maml.errors import UserError

USAGE = "train_maml.py PRESET"


def parse(arguments: Sequence[str]) -> Config:
    """Turn ``PRESET --flag value …`` into a checked `Config`.

    ``data_root`` is absolute then: config.yaml keeps it, for an evaluation from another folder.

    Raises:
        UserError: for an unknown preset, an unknown flag or a value that cannot work.
        SystemExit: with code 0 after ``--help``.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        if not arguments:
            raise UserError(f"no PRESET given; `{USAGE} --help` lists them all")
        _help(PRESETS["maml-glyphs-5way-1shot"])
    name, *flags = arguments
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists them all"
        raise UserError(f"unknown preset {name!r}: {hint}")
    if "-h" in flags or "--help" in flags:
        _help(PRESETS[name])
    output = io.StringIO()
    try:
        # The library frames its messages in a box; a batch log wants one line.
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            config = tyro.cli(Config, default=PRESETS[name], args=flags, prog=USAGE)
    except SystemExit as stop:
        raise UserError(_one_line(output.getvalue())) from stop
    check(config, PRESETS[name])
    data_root = user_path("data_root", config.data_root).absolute()
    return with_values(config, data_root=str(data_root))


def _help(default: Config) -> None:
    print(f"presets (published accuracy, source):\n{describe()}\n")
    tyro.cli(Config, default=default, args=["--help"], prog=USAGE)


def _one_line(box: str) -> str:
    """Return the sentence inside the parser's framed message."""
    lines = [line.strip(" |│╭╮╰╯─\t") for line in box.splitlines()]
    lines = [line for line in lines if line and not set(line) <= {"-"}]
    # First comes a title, last the pointer to --help.
    body = [line for line in lines[1:] if not line.startswith("For full helptext")]
    return re.sub(r"\s+", " ", " ".join(body))
