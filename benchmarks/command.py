"""What the benchmarks' commands share: their help, numbers that are checked, and their files.

All of it is refused before anything is measured: that takes minutes to hours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def command_line(
    name: str, description: str | None, *, record: bool = True, plot: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.<name>``, with the files that it writes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if record:
        parser.add_argument("--json", type=new_file, help="write the records to this file")
    if plot:
        parser.add_argument("--plot", type=new_file, help="draw the records into this file")
    return parser


def count(text: str) -> int:
    """Parse a whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return value


def new_file(text: str) -> Path:
    """Parse the path of a file that can be written; one that is there will be replaced."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no file in an existing folder")
    return path


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write ``report`` as JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")
