"""Shared by the benchmarks: flags, and a record, as a JSON file and as a table in Markdown.

Bad flags are refused before the measurement, which takes minutes to hours.
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
        raise argparse.ArgumentTypeError(f"{text}: must be a file in an existing folder")
    return path


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write ``record`` as JSON to ``path``, over an earlier one; None: write nothing."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")


def table(record: Mapping[str, Any], setting: str | None = None) -> str:
    """Return a record as a table in Markdown; ``setting`` selects one of its ``records``.

    A record has ``rows``, each with figures by name, and ``columns``: {title: format}. A cell is
    the row's figures in this format (``str.format_map``). A missing figure becomes a dash. A column
    of dashes is left out. A ``caption``, if the record has one, comes first.
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
    except (KeyError, TypeError):  # the row lacks the figure, or has None
        return "–"
