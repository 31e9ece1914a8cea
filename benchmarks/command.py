"""What the benchmarks' commands share: their help, numbers that are checked, and their files.

All of it is refused before anything is measured: that takes minutes to hours.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
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


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0")
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


def begun(path: Path | None, fresh: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return the record in ``path``, to go on with, if there is one; else ``fresh``.

    Args:
        path: What ``--json`` says.
        fresh: The record as it begins.
        settings: Keys in which both must be the same.

    Raises:
        SystemExit: with a line that names the file, if it is no record, or is of other settings.
    """
    if path is None or not path.exists():
        return fresh
    try:
        old: dict[str, Any] = json.loads(path.read_text())
        for name in settings:
            if old[name] != json.loads(json.dumps(fresh[name])):
                raise SystemExit(f"error: --json {path}: it is of other {name}: {old[name]}")
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: --json {path}: no record to go on with: {error!r}") from None
    return old
