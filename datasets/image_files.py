"""Files of images as they lie on disk, in a folder, a ``.zip`` or a ``.tar.xz``; and all decoded.

In a folder an image is a file whose ending Pillow reads. Hidden files and folders count for
nothing. Symbolic links are followed.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import lzma
import os
import tarfile
import unicodedata
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from datasets.errors import DataError
from datasets.paths import cache_root

Pixels: TypeAlias = NDArray[np.uint8]
Files: TypeAlias = Iterable[tuple[str, Callable[[], bytes]]]
"""Names of image files, and what reads each of them."""

# What Pillow knows by its first bytes and cannot decode by itself.
_NO_PIXELS = frozenset({"BUFR", "GRIB", "HDF5", "MPEG", "WMF"})
# Of archivers and file servers: copies of other files' names, no classes.
_NOT_CLASSES = frozenset({"__MACOSX", "@eaDir"})
_AT_ONCE = 64
_NAMED = 5


class ImageFile(NamedTuple):
    """An image's path below the root, and what changes when the file does."""

    path: str
    stamp: str


class Content(NamedTuple):
    """What lies directly in one folder, in the order of names, which all machines share.

    * ``images`` and ``folders``: as they are called
    * ``others``: the endings of all other files
    """

    images: list[ImageFile]
    folders: list[str]
    others: list[str]


@functools.cache
def endings() -> frozenset[str]:
    """The endings of the files that Pillow reads, as ``.png``."""
    Image.init()
    return frozenset(
        ending
        for ending, kind in Image.registered_extensions().items()
        if kind in Image.OPEN and kind not in _NO_PIXELS
    )


def look(root: Path, below: str = "") -> Content:
    """List the folder ``below`` of ``root``; not what is in its folders.

    Raises :class:`DataError`, naming the folder, if it cannot be listed.
    """
    images, folders, others = [], [], []
    try:
        with os.scandir(root / below) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name in _NOT_CLASSES:
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                    continue
                ending = os.path.splitext(entry.name)[1].lower()
                dangling = entry.is_symlink() and not os.path.exists(entry.path)
                if ending not in endings() or not (entry.is_file() or dangling):
                    others.append(shown(ending) or "without an ending")
                    continue
                path = f"{below}/{entry.name}" if below else entry.name
                # A link to nothing is an image that decoding will name.
                images.append(ImageFile(path, _stamp(entry.stat(follow_symlinks=not dangling))))
    except OSError as error:
        raise DataError(f"{shown(root / below)}: cannot be read ({error.strerror})") from error
    images.sort(key=lambda image: _in_order(image.path))
    return Content(images, sorted(folders, key=_in_order), others)


def _in_order(name: str) -> tuple[str, str]:
    """The key that names are sorted by, however a file system spells their accents."""
    return unicodedata.normalize("NFC", name), name


def shown(path: Path | str) -> str:
    """A path for a message of one line: quoted if it holds what cannot be printed."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def stamp(path: Path) -> str:
    """What changes when a file does. Raises ``OSError`` if it cannot be looked at."""
    return _stamp(path.stat())


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def fingerprint(lines: Iterable[str], size: int = 16) -> str:
    """A hash of ``size`` bytes of lines that change when images do."""
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=size).hexdigest()


def in_folder(folder: Path, names: Iterable[str]) -> Files:
    """The files of these names below a folder."""
    return ((name, (folder / name).read_bytes) for name in names)


def open_zip(path: Path) -> zipfile.ZipFile:
    """A ``.zip``. Raises :class:`DataError`, naming it, if it is none."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable zip archive ({error}); fetch it again") from error


def in_zip(archive: zipfile.ZipFile, names: Iterable[str]) -> Files:
    """The files of these names in a ``.zip``."""
    return ((name, functools.partial(archive.read, name)) for name in names)


def in_tar(path: Path, names: Sequence[str]) -> Files:
    """The files of these names in a ``.tar.xz``, in whatever folders of it; it may hold others.

    One pass, because ``.xz`` cannot seek. What comes before its turn waits in memory: nothing, if
    the archive is in order. Raises :class:`DataError`, naming the archive, if it cannot be read, or
    if a file is missing or there twice.
    """
    wanted, turn = set(names), 0
    seen: set[str] = set()
    waiting: dict[str, bytes] = {}
    try:
        with lzma.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    file = archive.extractfile(member) if name in wanted else None
                    if file is None:
                        continue
                    if name in seen:
                        raise DataError(f"{path}: {member.name} is there twice; fetch it again")
                    seen.add(name)
                    waiting[name] = file.read()
                    while turn < len(names) and names[turn] in waiting:
                        data = waiting.pop(names[turn])
                        yield names[turn], functools.partial(bytes, data)
                        turn += 1
            # The checksum of the contents follows them.
            while stream.read(1 << 20):
                pass
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise DataError(
            f"{path}: not a readable tar.xz archive ({error}); fetch it again"
        ) from error
    check_missing(path, [name for name in names if name not in seen], len(names))


def check_missing(path: Path, missing: Sequence[str], of: int) -> None:
    """Raise :class:`DataError`, naming ``path`` and a file, if any of its files are missing."""
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise DataError(
            f"{path}: {missing[0]}{more} missing, of the {of} images; restore the complete contents"
        )


def decode_all(
    place: Path, files: Files, decode: Callable[[Image.Image], Pixels]
) -> Iterator[Pixels]:
    """All images in order, decoded, in chunks: uint8 ``[n, …]``.

    One thread for each core: Pillow decodes and resizes outside the interpreter's lock. ``place``
    is where the files are, for messages. Raises :class:`DataError` at the end if images are
    damaged, naming some of them, and a file that lists them where they are many.
    """
    damaged: list[str] = []

    def decoded(file: tuple[str, Callable[[], bytes]]) -> Pixels | None:
        name, read = file
        try:
            with Image.open(io.BytesIO(read())) as image:
                return decode(image)
        # Pillow's readers meet damaged bytes with errors of every kind.
        except Exception as error:
            damaged.append(f"{shown(place / name)} ({_reason(error)})")
            return None

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, left = 0, iter(files)
    with warnings.catch_warnings(), ThreadPoolExecutor(cores, "decode") as threads:
        # About odd EXIF data and large images; what matters is whether they can be decoded.
        warnings.simplefilter("ignore")
        # Not all at once: the pixels of a large folder do not fit into memory.
        while some := list(itertools.islice(left, _AT_ONCE * (cores or 1))):
            total += len(some)
            pixels = [found for found in threads.map(decoded, some) if found is not None]
            if not damaged:
                yield np.stack(pixels)
    if damaged:
        raise DataError(_damage(sorted(damaged), total))


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _damage(damaged: list[str], of: int) -> str:
    """The line about images that cannot be decoded; a file takes those for which it has no room."""
    named = "; ".join(damaged[:_NAMED])
    if len(damaged) > _NAMED:
        path = cache_root() / "damaged.txt"
        named += f"; and {len(damaged) - _NAMED} more"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in damaged), encoding="utf-8")
            named += f", all of them listed in {path}"
        except OSError:
            pass
    return (
        f"{len(damaged)} of {of} images cannot be decoded: {named}: repair them, fetch them again "
        "or move them away"
    )
