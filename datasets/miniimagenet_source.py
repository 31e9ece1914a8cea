"""MiniImageNet as it lies on disk: a split's table, and its images, checked against the table."""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datasets.errors import DataError

SIZE = (84, 84)
SHAPE = (*SIZE, 3)

# What damaged bytes raise, from the file system, lzma, tarfile or Pillow.
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    RuntimeError,
    lzma.LZMAError,
    tarfile.TarError,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class Table:
    """Which images a split consists of: the names of the files of each label, both sorted."""

    path: Path
    classes: dict[str, list[str]]

    def names(self) -> list[str]:
        """The names of all files, in class order."""
        return [name for names in self.classes.values() for name in names]

    def fingerprint(self) -> str:
        """A hash of the contents, whatever the order of the rows in the file."""
        lines = (f"{label} {' '.join(names)}" for label, names in self.classes.items())
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def read_table(path: Path, classes: int, per_class: int) -> Table:
    """Read a table with the columns ``filename`` and ``label``.

    Raises :class:`DataError`, naming the file and what is wrong, unless it lists ``classes`` labels
    with ``per_class`` images each, and no image twice.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a readable table ({error}); restore it") from error
    if header != ["filename", "label"]:
        raise DataError(f"{path}: the columns are not filename,label; restore the table")
    found: dict[str, list[str]] = defaultdict(list)
    for number, row in enumerate(rows, start=2):
        if len(row) != 2 or not all(row) or "/" in row[0]:
            raise DataError(f"{path}: row {number} is not a file name and a label; restore it")
        found[row[1]].append(row[0])
    counts = Counter(row[0] for row in rows)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise DataError(f"{path}: {_few(sorted(repeated))} listed twice; restore the table")
    if len(found) != classes:
        raise DataError(f"{path}: {len(found)} classes instead of {classes}; restore the table")
    for label, names in sorted(found.items()):
        if len(names) != per_class:
            raise DataError(
                f"{path}: {label} has {len(names)} images instead of {per_class}; restore the table"
            )
    return Table(path, {label: sorted(found[label]) for label in sorted(found)})


class Images:
    """The images of a table: in a ``.tar.xz`` or a folder, which may hold others too."""

    def __init__(self, path: Path, table: Table) -> None:
        """Reads nothing yet."""
        self.path = path
        self._table = table

    def fingerprint(self) -> str:
        """The size and modification time of the archive; in a folder, a hash of all the files'.

        Raises :class:`DataError` if images are missing from the folder, or the archive cannot be
        looked at.
        """
        try:
            if not self.path.is_dir():
                return _stamp(self.path)
            digest, missing = hashlib.blake2b(digest_size=16), []
            for name in self._table.names():
                try:
                    digest.update(f"{_stamp(self.path / name)}\n".encode())
                except FileNotFoundError:
                    missing.append(name)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error})") from error
        self._check_missing(missing)
        return digest.hexdigest()

    def classes(self) -> Iterator[NDArray[np.uint8]]:
        """The classes in the table's order, each uint8 ``[images, 84, 84, 3]``.

        One pass over the archive, because ``.xz`` cannot seek. What comes before its turn waits in
        memory: one class if the archive is in order, as the usual ones are.

        Raises :class:`DataError` naming the archive, and the member that cannot be decoded, is
        there twice or is missing.
        """
        turn = iter(self._table.classes)
        place = {
            name: (label, number)
            for label, names in self._table.classes.items()
            for number, name in enumerate(names)
        }
        waiting: dict[str, NDArray[np.uint8]] = {}
        lacking = {label: len(names) for label, names in self._table.classes.items()}
        seen: set[str] = set()
        label_due = next(turn, None)
        for member, data in self._members(place):
            name = PurePosixPath(member).name
            if name in seen:
                raise DataError(f"{self.path}: {member} is there twice; fetch the archive again")
            seen.add(name)
            label, number = place[name]
            if label not in waiting:
                waiting[label] = np.empty((lacking[label], *SHAPE), dtype=np.uint8)
            waiting[label][number] = self._decoded(member, data)
            lacking[label] -= 1
            while label_due is not None and lacking[label_due] == 0:
                yield waiting.pop(label_due)
                label_due = next(turn, None)
        self._check_missing([name for name in place if name not in seen])

    def _members(self, wanted: dict[str, tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
        """The names and contents of the files that are called as the wanted ones."""
        if self.path.is_dir():
            yield from self._files(wanted)
            return
        try:
            with lzma.open(self.path) as stream:
                with tarfile.open(fileobj=stream, mode="r|") as archive:
                    for member in archive:
                        if member.isfile() and PurePosixPath(member.name).name in wanted:
                            file = archive.extractfile(member)
                            assert file is not None, "a regular file has contents"
                            yield member.name, file.read()
                # The checksum of the contents follows them.
                while stream.read(1 << 20):
                    pass
        except _UNREADABLE as error:
            raise DataError(
                f"{self.path}: not a readable tar.xz archive ({error}); fetch it again"
            ) from error

    def _files(self, wanted: dict[str, tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
        for name in wanted:
            try:
                data = (self.path / name).read_bytes()
            except OSError as error:
                raise DataError(f"{self.path / name}: cannot be read ({error})") from error
            yield name, data

    def _decoded(self, member: str, data: bytes) -> NDArray[np.uint8]:
        try:
            return decode(data)
        except _UNREADABLE as error:
            raise DataError(
                f"{self.path}: cannot decode {member} ({error}); fetch it again"
            ) from error

    def _check_missing(self, names: list[str]) -> None:
        if names:
            raise DataError(
                f"{self.path}: {_few(names)} missing, of the {len(self._table.names())} images in "
                f"{self._table.path.name}; restore the complete contents"
            )


def decode(data: bytes) -> NDArray[np.uint8]:
    """An image of any size to uint8 ``[84, 84, 3]``, RGB.

    Raises ``OSError`` or ``ValueError`` if it is not an image.
    """
    with Image.open(io.BytesIO(data)) as image:
        colour = image.convert("RGB")
    if colour.size != SIZE:
        colour = colour.resize(SIZE, Image.Resampling.LANCZOS)
    return np.asarray(colour, dtype=np.uint8)


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _few(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
