"""What the benchmarks share: flags, and a record, in its file and as a table in Markdown.

Bad flags are refused before anything is measured: that takes minutes to hours.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maml.config.parser import Parser
from maml.studies import grid


def parser(name: str, description: str | None) -> Parser:
    """Return the parser of ``python -m benchmarks.<name>``, which writes a record."""
    made = Parser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--json", type=_new_file, help="write the records to this file")
    return made


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no file in an existing folder")
    return path


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write ``record`` as JSON, in place of an earlier one, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")


def table(record: Mapping[str, Any], setting: str | None = None) -> str:
    """Return a benchmark's record as Markdown, or, of its ``records``, that of one ``setting``.

    A record has ``rows``, each with its figures by name, and ``columns``: what stands above each,
    and how it is made of a row's figures, as ``str.format`` takes it. A row that lacks a figure has
    a dash; a column that no row has is left out. ``caption``, if there is one, comes first.
    """
    if setting is not None:
        record = {each["setting"]: each for each in record["records"]}[setting]
    columns = {
        title: [_cell(shown, row) for row in record["rows"]]
        for title, shown in record["columns"].items()
    }
    columns = {title: cells for title, cells in columns.items() if set(cells) != {"–"}}
    caption = f"{record['caption']}\n\n" if "caption" in record else ""
    return caption + grid(list(columns), zip(*columns.values(), strict=True))


def _cell(shown: str, row: Mapping[str, Any]) -> str:
    try:
        return shown.format_map(row)
    except (KeyError, TypeError):  # it has no such figure, or None
        return "–"
