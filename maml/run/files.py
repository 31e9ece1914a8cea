"""Write and read a run's files.

A file may be a stranger's, so its types are checked. A form is a type, a tuple of other forms,
``[form]`` for a list, ``{str: form}`` for a dictionary with any keys, or ``{name: form}`` for one
with these entries and others. A missing entry is None.
"""

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets.whole import no_link, regular, written
from maml.errors import UserError

TEXTS = ("split", "data", "images", "time", "reason", "action")
"""The fields of a row that may hold text."""

TESTED = "test_tasks.csv"
"""The scores of each test task. The address (split, seed, index) identifies a task: runs with the
same data set, ways, shots, queries and seed have the same tasks and can be compared by task."""
ADDRESS = ("split", "seed", "index")

Scores = dict[tuple[str, int, int], dict[str, float]]
"""Maps a task's address (split, seed, index) to its metrics by name."""


Form: TypeAlias = Any

NUMBER = float | int
CLASSES = {str: [str]}
STATUS = {"state": str, "iteration": int}
RESULT = {
    "tasks": int, "transductive": bool, "iterations": int | None, "tested_iteration": int | None,
    "skipped": int | None, "ensemble": ([int], None),
}  # fmt: skip
MACHINE = {"processor": str, "gpu": str | None}
START = {
    "git_commit": str | None, "iteration": int | None, "processes": int | None,
    "threads": int | None, "machine": (MACHINE, None), "own_files": ({str: {str: str}}, None),
}  # fmt: skip
RECORD = {
    "starts": [START], "minutes": NUMBER, "note": str, "hardware": MACHINE | {"date": str},
    "division": str | None, "model_sha256": str | None, "model_bytes": int | None,
}  # fmt: skip


@contextlib.contextmanager
def naming(what: Path | str, words: str) -> Iterator[None]:
    """Raise an OSError inside as a UserError: ``what``, and ``words`` with the reason in them."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {words.format(error.strerror)}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file atomically; if that fails, raise a UserError that names the file."""
    with naming(path, "cannot write: {}"), written(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """`write_bytes`, for text."""
    write_bytes(path, text.encode())


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON in one write, so that a later crash keeps it; errors as `write_bytes`.

    A full disk may have cut the last line short. Then the new line still begins a line.
    """
    with naming(path, "cannot write: {}"), open(no_link(path), "ab+") as file:
        file.seek(max(file.tell() - 1, 0))
        is_cut = file.read(1) not in (b"", b"\n")
        file.write(("\n" * is_cut + json.dumps(row) + "\n").encode())


def read_rows(path: Path, *, mended: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl or evaluations.jsonl; without a file, an empty list.

    Leave out a last line that was cut short; with ``mended``, also such lines before it. A
    UserError names a file that cannot be read, or that has another line that is not a row.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder")
    if not path.is_file():
        return []  # no file, or a device, which keeps no rows
    with naming(path, "cannot read: {}"):
        *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            row = _parsed(line)
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


def _parsed(text: str | bytes) -> Any:
    """Return what JSON says; a whole number that would be too large for a float becomes inf."""
    return json.loads(text, parse_int=lambda n: int(n) if len(n) < 20 else float(n))


def keep_rows(path: Path, which: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the rows for which ``which`` is false; errors as in `read_rows` and `write_bytes`."""
    text = "".join(json.dumps(row) + "\n" for row in read_rows(path) if which(row))
    # Also write if a crash cut the last line short, because the next row would join that line.
    if path.is_file() and text.encode() != path.read_bytes():
        write_text(path, text)


def read_object(path: Path, form: Form) -> dict[str, Any]:
    """Return the JSON object of a ``form`` in a file; a UserError names a missing or wrong file."""
    try:
        with naming(path, "{}: not a whole record or run"):
            content = _parsed(regular(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: damaged: no JSON object")
    if wrong := misfit(content, form):
        raise UserError(f"{path}: damaged: its {wrong}")
    return content


def read_json(path: Path, form: Form) -> dict[str, Any]:
    """Return the JSON object of a ``form`` in a file, or an empty one if there is none."""
    with contextlib.suppress(UserError):
        return read_object(path, form)
    return {}


def headline(scores: Container[str]) -> str:
    """Return the metric that judges a result: the first of accuracy, return and loss it has."""
    return next(name for name in ("accuracy", "return", "loss") if name in scores)


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder to write into, if it does not exist; a UserError names ``flag``."""
    with naming(f"{flag} {folder}", "{}"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {folder}: not writable")


def refuse_links(run_dir: Path, *names: str) -> None:
    """Raise UserError if one of these entries of a run directory is a link: a run writes there."""
    for path in map(run_dir.joinpath, names):
        with naming(path, "{}: remove it"):
            no_link(path)


def write_tasks(
    run_dir: Path, split: str, seed: int, names: Sequence[str], values: Sequence[Sequence[float]]
) -> None:
    """Write `TESTED`: row i is task i of ``split``, with its metrics ``names`` to the last bit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ADDRESS, *names])
    for index, row in enumerate(values):
        writer.writerow([split, seed, index, *map(repr, row)])
    write_text(run_dir / TESTED, text.getvalue())


def read_tasks(path: Path) -> Scores:
    """Return each task's scores from a file that `write_tasks` wrote, or raise a UserError."""
    try:
        with naming(path, "cannot read: {}"):
            rows = list(csv.reader(regular(path).read_text(encoding="utf-8").splitlines()))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    if not rows or tuple(rows[0][: len(ADDRESS)]) != ADDRESS:
        raise UserError(f"{path}: not a table of tasks: its first line must begin {ADDRESS}")
    names = rows[0][len(ADDRESS) :]
    scores: Scores = {}
    for number, row in enumerate(rows[1:], start=2):
        try:
            address = (row[0], int(row[1]), int(row[2]))
            values = dict(zip(names, map(float, row[len(ADDRESS) :]), strict=True))
        except (ValueError, IndexError):
            raise UserError(f"{path}: line {number} is damaged") from None
        if address in scores:
            raise UserError(f"{path}: line {number}: task {address} is there twice")
        scores[address] = values
    return scores


def fits(value: Any, form: Form) -> bool:
    """Return whether a value has a form."""
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if form is None:
        return value is None
    if not isinstance(form, dict):
        return isinstance(value, form)
    if not isinstance(value, dict):
        return False
    if str in form:
        return all(isinstance(key, str) and fits(each, form[str]) for key, each in value.items())
    return all(fits(value.get(name), of) for name, of in form.items())


def misfit(content: dict[str, Any], form: Form) -> str:
    """Describe the first entry that does not fit its form or is an empty list; "" if all do."""
    for name, of in (dict.fromkeys(content, form[str]) if str in form else form).items():
        if not fits(content.get(name), of) or content.get(name) == []:
            return f"{name} is {content.get(name)!r}"[:200]
    return ""
