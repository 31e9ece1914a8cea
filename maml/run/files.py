"""How a run's files are written, and read again."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from maml.errors import UserError

TEXTS = ("split", "data", "time", "reason", "action")
"""What a row may say in words."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file atomically; a failure is one line that names it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot write: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """`write_bytes`, for text."""
    write_bytes(path, text.encode())


def append_line(path: Path, line: str) -> None:
    """Append a line in one write: it survives whatever comes next. Fails as `write_bytes` does."""
    try:
        with open(path, "a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from error


def read_rows(path: Path, *, mended: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl or evaluations.jsonl; none where there is no file.

    A last line that was cut short is left out; with ``mended``, also one before others. A UserError
    names a file that cannot be read, or has another line that is no row.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder")
    if not path.is_file():
        return []  # no file, or a device, which keeps no rows
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    rows = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number > len(lines) or (mended and line.startswith(b"{")):
                continue
            row = None
        is_row = isinstance(row, dict) and type(row.get("iteration")) is int
        if not is_row or any(isinstance(row[name], str) for name in row.keys() - set(TEXTS)):
            raise UserError(
                f"{path}: line {number} is not a row of numbers with its iteration: the file is "
                "damaged; restore it, or move it away"
            )
        rows.append(row)
    return rows


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; a UserError names one that is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a whole record or run") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: damaged: no JSON object")
    return found


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder to write into, if it is not there; a UserError names ``flag``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {folder}: not writable")
