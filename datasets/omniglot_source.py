"""Omniglot as it lies on disk: an official archive or its extracted folder, checked by content."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datasets.errors import DataError
from datasets.omniglot_alphabets import DRAWINGS

ORIGINAL_SIZE = (105, 105)
SIZE = (28, 28)

# What a damaged member raises, from the file system, zipfile or Pillow.
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


class Part:
    """One half of the data set: a ``.zip`` or a folder of ``alphabet/characterNN/*.png``.

    ``alphabets`` says what must be in it. Raises :class:`DataError`, naming the file and what is
    wrong, unless it holds exactly those alphabets, with their characters, 20 drawings each. Reads
    names only, no image.
    """

    def __init__(self, path: Path, alphabets: Mapping[str, int]) -> None:
        """Read the names in ``path`` and check them against ``alphabets``."""
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        members = self._folder_members() if path.is_dir() else self._zip_members()
        self._entries = sorted(entry for _, entry in members)
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, _ in members:
            parts = PurePosixPath(name).parts
            if len(parts) < 3:
                raise DataError(
                    f"{path}: unexpected file {name}; expected alphabet/characterNN/*.png"
                )
            found[parts[-3], parts[-2]].append(name)
        self._check(found, alphabets)
        self._drawings = {where: sorted(names) for where, names in sorted(found.items())}

    def _zip_members(self) -> list[tuple[str, str]]:
        try:
            self._archive = zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{self.path}: not a readable zip archive ({error}); fetch it again"
            ) from error
        return [
            (info.filename, f"{info.filename} {info.CRC} {info.file_size}")
            for info in self._archive.infolist()
            if _is_drawing(info.filename)
        ]

    def _folder_members(self) -> list[tuple[str, str]]:
        members = []
        for file in self.path.rglob("*.png"):
            name = file.relative_to(self.path).as_posix()
            if _is_drawing(name):
                status = file.stat()
                members.append((name, f"{name} {status.st_size} {status.st_mtime_ns}"))
        return members

    def _check(
        self, found: Mapping[tuple[str, str], list[str]], alphabets: Mapping[str, int]
    ) -> None:
        expected = {
            (a, f"character{i:02d}") for a, count in alphabets.items() for i in range(1, count + 1)
        }
        if missing := sorted(expected - found.keys()):
            raise DataError(
                f"{self.path}: {_few(missing)} missing; fetch the complete archive again"
            )
        if extra := sorted(found.keys() - expected):
            raise DataError(
                f"{self.path}: {_few(extra)} not part of Omniglot; restore the original contents"
            )
        for where, names in sorted(found.items()):
            if len(names) != DRAWINGS:
                raise DataError(
                    f"{self.path}: {'/'.join(where)} has {len(names)} drawings instead of "
                    f"{DRAWINGS}; fetch it again"
                )

    def fingerprint(self) -> str:
        """A hash of the contents.

        Of a zip, the names, CRCs and sizes of its drawings; of a folder, their names, sizes and
        modification times.
        """
        return hashlib.blake2b("\n".join(self._entries).encode(), digest_size=16).hexdigest()

    def characters(self) -> Iterator[NDArray[np.uint8]]:
        """The characters in class order, each uint8 ``[20, 28, 28]`` with ink 255 on paper 0.

        Raises :class:`DataError` naming the archive and the member that cannot be decoded.
        """
        for names in self._drawings.values():
            yield np.stack([self._drawing(name) for name in names])

    def _drawing(self, name: str) -> NDArray[np.uint8]:
        try:
            data = (
                (self.path / name).read_bytes()
                if self._archive is None
                else self._archive.read(name)
            )
            return decode(data)
        except _UNREADABLE as error:
            raise DataError(
                f"{self.path}: cannot decode {name} ({error}); fetch it again"
            ) from error


def decode(data: bytes) -> NDArray[np.uint8]:
    """One PNG to uint8 ``[28, 28]`` with ink 255 on paper 0.

    Raises ``OSError`` or ``ValueError`` if it is not a drawing.
    """
    with Image.open(io.BytesIO(data)) as image:
        if image.size != ORIGINAL_SIZE:
            raise ValueError(f"{image.size[0]}x{image.size[1]} pixels instead of 105x105")
        # The files are one-bit, and on a one-bit image Pillow's resize silently falls back to
        # nearest: grey first.
        grey = image.convert("L").resize(SIZE, Image.Resampling.LANCZOS)
    return np.uint8(255) - np.asarray(grey, dtype=np.uint8)


def _is_drawing(name: str) -> bool:
    """A PNG that is not one of the resource forks and hidden files that some archivers add."""
    parts = PurePosixPath(name).parts
    return name.endswith(".png") and "__MACOSX" not in parts and not parts[-1].startswith(".")


def _few(characters: list[tuple[str, str]]) -> str:
    """The first of some characters, by name, and how many more there are."""
    first = "/".join(characters[0])
    more = f" and {len(characters) - 1} more characters" if len(characters) > 1 else ""
    return f"{first}{more}" + (" are" if more else " is")
