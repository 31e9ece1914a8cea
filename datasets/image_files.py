"""List and decode image files in a folder, a ``.zip`` or a ``.tar.xz``.

In a folder, an image is a file with an ending that Pillow reads. Hidden files and folders are
ignored. Symbolic links are followed.
"""

import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from datasets.cache import Mapped, cached
from datasets.errors import DataError
from datasets.registry import find
from datasets.whole import regular
from datasets.words import reason

Pixels: TypeAlias = NDArray[np.uint8]
Read: TypeAlias = Callable[[str], bytes]
Decode: TypeAlias = Callable[[Image.Image], Pixels]
Mode = Literal["rgb", "grey"]

STUBS = ("BUFR", "GRIB", "HDF5", "MPEG", "WMF")
"""Kinds of files that Pillow recognises, but does not read by itself."""
_AT_ONCE = 64
_NAMED = 5
_MOST_PIXELS = 4096


class Content(NamedTuple):
    """The direct content of a folder: paths of images below the root, and names of folders."""

    images: list[str]
    folders: list[str]


@functools.cache
def endings() -> frozenset[str]:
    """Return the endings of the files that Pillow reads, such as ``.png``."""
    Image.init()
    known = Image.registered_extensions().items()
    return frozenset(ending for ending, kind in known if kind in Image.OPEN and kind not in STUBS)


def look(root: Path, below: str = "") -> Content:
    """List the folder ``below`` of ``root``, or raise a :class:`DataError` that names it."""
    images, folders = [], []
    try:
        with os.scandir(root / below) as entries:
            for entry in entries:
                # Archivers and file servers add these. They are no images and no classes.
                if entry.name[0] == "." or entry.name in ("__MACOSX", "@eaDir"):
                    continue
                is_image = os.path.splitext(entry.name)[1].lower() in endings()
                # Broken links are listed, too: the error of their reader will name them.
                is_broken = entry.is_symlink() and not os.path.exists(entry)
                if (is_broken and not is_image) or (not is_broken and entry.is_dir()):
                    folders.append(entry.name)
                elif is_image:
                    images.append(f"{below}/{entry.name}" if below else entry.name)
    except OSError as error:
        raise DataError(f"{shown(root / below)}: cannot be read ({error.strerror})") from error
    return Content(sorted(images, key=_in_order), sorted(folders, key=_in_order))


def _in_order(name: str) -> tuple[str, str]:
    """Return a sort key that does not depend on how a file system encodes accents."""
    return unicodedata.normalize("NFC", name), name


def shown(path: Path | str) -> str:
    """Return a path for a one-line message, quoted if it has unprintable characters."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


class Source(NamedTuple):
    """Images on disk: ``state`` changes when the files do; ``chunks`` decodes all in order."""

    state: str
    chunks: Callable[[], Iterator[Pixels]]


def in_folder(folder: Path, names: Sequence[str], decode: Decode) -> Source:
    """Return the source of the files with these names below a folder."""
    # Join the paths as strings, because pathlib is slow and there may be many files.
    state = "\n".join(f"{name} {stamp(f'{folder}/{name}')}" for name in names)

    def read(name: str) -> bytes:
        return regular(folder / name).read_bytes()

    return Source(state, lambda: decode_all(folder, names, read, decode))


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a ``.zip``, or raise a :class:`DataError` that names it."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable zip archive ({error}); fetch it again") from error


def in_zip(archive: zipfile.ZipFile, names: Sequence[str], decode: Decode) -> Source:
    """Return the source of the files with these names in a ``.zip``."""
    members = map(archive.getinfo, names)
    state = "\n".join(f"{file.filename} {file.CRC} {file.file_size}" for file in members)
    place = Path(str(archive.filename))
    return Source(state, lambda: decode_all(place, names, archive.read, decode))


def in_tar(path: Path, names: Sequence[str], decode: Decode) -> Source:
    """Return the source of files by name, in any folders of a ``.tar.xz``; ignore other files."""
    state = "\n".join([*names, stamp(path)])
    return Source(state, lambda: decode_all(path, names, _of_tar(path, {*names}), decode))


def _of_tar(path: Path, names: set[str]) -> Read:
    """Return a reader of these files from memory, because ``.xz`` cannot seek."""
    contents: dict[str, bytes] = {}
    try:
        with lzma.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    file = archive.extractfile(member) if name in names else None
                    if file is not None:
                        contents[name] = file.read()
            # Read to the end to check the checksum, which follows the contents.
            while stream.read(1 << 20):
                pass
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise DataError(f"{path}: not a readable tar.xz file ({error}); fetch it again") from error

    def read(name: str) -> bytes:
        if name not in contents:
            raise FileNotFoundError("not in the archive")
        return contents[name]

    return read


def cached_images(
    name: str, sources: Sequence[Source], shape: tuple[int, ...], title: str
) -> Mapped:
    """Decode all images of the sources once; map them from the cache: uint8 ``shape``."""
    state = "\n".join(source.state for source in sources).encode("utf-8", "surrogateescape")
    return cached(
        f"{name}-{hashlib.blake2b(state, digest_size=12).hexdigest()}.npy",
        shape,
        lambda: itertools.chain.from_iterable(source.chunks() for source in sources),
        title,
    )


def stamp(path: Path | str) -> str:
    """Return a text that changes with a file; "" for a missing file, which decoding will report."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime_ns}"
    return ""


def decode_all(place: Path, names: Sequence[str], read: Read, decode: Decode) -> Iterator[Pixels]:
    """Yield all images in order, in chunks uint8 ``[n, …]``; at the end, raise for damaged ones."""
    damaged: list[str] = []

    def decoded(name: str) -> Pixels | None:
        try:
            with Image.open(io.BytesIO(read(name))) as image:
                return decode(image)
        # For damaged bytes, Pillow's readers raise errors of every kind.
        except Exception as error:
            unknown = isinstance(error, UnidentifiedImageError)
            why = "not an image that Pillow knows" if unknown else reason(error)
            damaged.append(f"{shown(place / name)} ({why})")
            return None

    # Pillow decodes and resizes outside the interpreter's lock.
    cores = len(os.sched_getaffinity(0))
    with warnings.catch_warnings(), ThreadPoolExecutor(cores, "decode") as threads:
        # Pillow warns about odd EXIF data and large images. Only decoding errors matter here.
        warnings.simplefilter("ignore")
        # Not all at once: the pixels of a large folder do not fit into memory.
        for start in range(0, len(names), _AT_ONCE * cores):
            some = threads.map(decoded, names[start : start + _AT_ONCE * cores])
            pixels = [image for image in some if image is not None]
            if not damaged:
                yield np.stack(pixels)
    if damaged:
        named = "; ".join(sorted(damaged)[:_NAMED])
        more = f"; and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
        raise DataError(
            f"{len(damaged)} of {len(names)} images cannot be decoded: {named}{more}: repair them, "
            "fetch them again or move them away"
        )


class Decoder:
    """Convert images to arrays, ``size`` pixels wide and high, in colour (rgb) or grey."""

    def __init__(self, size: int, mode: str) -> None:
        """Raise a :class:`DataError` that names the flag for an invalid size or mode."""
        if not isinstance(size, int) or not 1 <= size <= _MOST_PIXELS:
            raise DataError(f"--image-size {size!r}: must be between 1 and {_MOST_PIXELS}")
        if mode not in ("rgb", "grey"):
            raise DataError(f"--image-mode {mode}: unknown; one of rgb, grey")
        self.size, self.mode = size, mode

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an image: ``[size, size, 3]`` or ``[size, size]``."""
        return (self.size, self.size, 3) if self.mode == "rgb" else (self.size, self.size)

    def file(self, opened: Image.Image) -> Pixels:
        """Decode an image file that Pillow has just opened, as :meth:`image` does."""
        # A JPEG much larger than wanted is decoded at a half, a quarter or an eighth of its size.
        opened.draft(None, (2 * self.size, 2 * self.size))
        return self.image(opened)

    def image(self, opened: Image.Image) -> Pixels:
        """Return one image as uint8 ``[size, size]`` or ``[size, size, 3]``.

        The image is turned upright by its EXIF data, and transparent parts become white. The
        shorter side becomes ``size`` pixels long; the longer side is cut at both ends to match.
        Raise ``ValueError`` for pixels of an unknown range. Pillow's errors pass through.
        """
        image = ImageOps.exif_transpose(opened)
        if image.mode[0] in "IF":
            raise ValueError("more than 8 bits a pixel, of an unknown range: save it with 8 bits")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if self.mode == "rgb" else "L")
        fitted = ImageOps.fit(image, (self.size, self.size), Image.Resampling.LANCZOS)
        return np.asarray(fitted, dtype=np.uint8)


def as_in(data: str, pictures: Pixels) -> Pixels:
    """Return pictures, uint8 ``[n, H, W(, 3)]``, in the form of the data set's own images."""
    # Invert a drawing on bright paper (median pixel above 127), as Omniglot's images are inverted.
    if not find(data).ink:
        return pictures
    bright = np.median(pictures.reshape(len(pictures), -1), axis=1) > 127
    return np.where(bright.reshape(-1, *[1] * (pictures.ndim - 1)), 255 - pictures, pictures)
