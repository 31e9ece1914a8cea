"""MiniImageNet as it lies on disk: a split's table, and its images, checked against the table.

A folder with a folder for each class is a table of its own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import lzma
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datasets.errors import DataError
from datasets.folder_source import look

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
    return _complete(path, found, classes, per_class, "restore the table")


def list_classes(path: Path, classes: int, per_class: int) -> Table:
    """The table of a folder that has a folder for each class, called by its label.

    Names are paths below ``path``, ``<label>/<file>``. Raises :class:`DataError`, naming the folder
    and what is wrong, as :func:`read_table` does.
    """
    labels = look(path).folders
    found = {label: [image.path for image in look(path, label).images] for label in labels}
    return _complete(path, found, classes, per_class, "restore the complete contents")


def _complete(
    path: Path, found: Mapping[str, list[str]], classes: int, per_class: int, way_out: str
) -> Table:
    if len(found) != classes:
        raise DataError(f"{path}: {len(found)} classes instead of {classes}; {way_out}")
    for label, names in sorted(found.items()):
        if len(names) != per_class:
            raise DataError(
                f"{path}: {label} has {len(names)} images instead of {per_class}; {way_out}"
            )
    return Table(path, {label: sorted(found[label]) for label in sorted(found)})


class Images:
    """The images of a table: in a ``.tar.xz`` or a folder, which may hold others too."""

    def __init__(self, path: Path, table: Table) -> None:
        """Reads nothing yet."""
        self.path = path
        self._table = table

    def fingerprint(self) -> str:
        """The table's, and the size and modification time of the archive.

        In a folder a hash of all the files'.

        Raises :class:`DataError` if images are missing from the folder, or the archive cannot be
        looked at.
        """
        table = self._table.fingerprint()
        try:
            if not self.path.is_dir():
                return table + stamp(self.path)
            digest, missing = hashlib.blake2b(digest_size=16), []
            for name in self._table.names():
                try:
                    digest.update(f"{stamp(self.path / name)}\n".encode())
                except FileNotFoundError:
                    missing.append(name)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error})") from error
        self._check_missing(missing)
        return table + digest.hexdigest()

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
        for name, member, data in self._members(place):
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

    def _members(self, wanted: dict[str, tuple[str, int]]) -> Iterator[tuple[str, str, bytes]]:
        """Of the wanted files: their names, what they are called here, and their contents.

        Archives may have them in any folder.
        """
        if self.path.is_dir():
            yield from self._files(wanted)
            return
        try:
            with lzma.open(self.path) as stream:
                with tarfile.open(fileobj=stream, mode="r|") as archive:
                    for member in archive:
                        name = PurePosixPath(member.name).name
                        if member.isfile() and name in wanted:
                            file = archive.extractfile(member)
                            assert file is not None, "a regular file has contents"
                            yield name, member.name, file.read()
                # The checksum of the contents follows them.
                while stream.read(1 << 20):
                    pass
        except _UNREADABLE as error:
            raise DataError(
                f"{self.path}: not a readable tar.xz archive ({error}); fetch it again"
            ) from error

    def _files(self, wanted: dict[str, tuple[str, int]]) -> Iterator[tuple[str, str, bytes]]:
        for name in wanted:
            try:
                data = (self.path / name).read_bytes()
            except OSError as error:
                raise DataError(f"{self.path / name}: cannot be read ({error})") from error
            yield name, name, data

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


def stamp(path: Path) -> str:
    """What changes when a file does. Raises ``OSError`` if it cannot be looked at."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _few(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
