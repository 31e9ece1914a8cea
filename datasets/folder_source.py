"""Folders of images as they lie on disk: what is in them, and how an image is decoded.

An image is a file whose ending Pillow reads. Other files are ignored and counted; so are hidden
files and folders, without a word. Symbolic links are followed.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import sys
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from datasets.errors import DataError
from datasets.paths import cache_root
from datasets.words import counted

Mode = Literal["rgb", "grey"]

# What Pillow knows by its first bytes and cannot decode by itself.
_NO_PIXELS = frozenset({"BUFR", "GRIB", "HDF5", "MPEG", "WMF"})
# Of archivers and file servers: copies of other files' names, no classes.
_NOT_CLASSES = frozenset({"__MACOSX", "@eaDir"})
_CHUNK = 16
_NAMED = 5


class Decoding(NamedTuple):
    """How images become arrays: ``size`` pixels wide and high, in colour (rgb) or not (grey)."""

    size: int
    mode: Mode

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an image: ``[size, size, 3]`` or ``[size, size]``."""
        return (self.size, self.size, 3) if self.mode == "rgb" else (self.size, self.size)


class Decoded(NamedTuple):
    """An image as an array, and the highest value that it had where a value has 16 bits; else 0."""

    pixels: NDArray[np.uint8]
    highest: int


class ImageFile(NamedTuple):
    """An image's path below the root, and what changes when the file does."""

    path: str
    bytes: int
    modified_ns: int


class Content(NamedTuple):
    """What lies directly in one folder.

    * ``images`` and ``folders``: in the order of their names, which is the same on every machine
    * ``others``: how many files there are besides, by ending
    """

    images: list[ImageFile]
    folders: list[str]
    others: Counter[str]


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
    content = Content([], [], Counter())
    folder = root / below
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    _sort_in(entry, below, content)
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read ({error.strerror})") from error
    content.images.sort(key=lambda image: in_order(image.path))
    content.folders.sort(key=in_order)
    return content


def _sort_in(entry: os.DirEntry[str], below: str, content: Content) -> None:
    if entry.is_dir():
        if entry.name not in _NOT_CLASSES:
            content.folders.append(entry.name)
        return
    stem, dot, after = entry.name.rpartition(".")
    ending = (dot + after).lower() if stem else ""
    dangling = entry.is_symlink() and not os.path.exists(entry.path)
    if ending not in endings() or not (entry.is_file() or dangling):
        content.others[shown(ending) or "without an ending"] += 1
        return
    path = f"{below}/{entry.name}" if below else entry.name
    # A link to nothing is an image that decoding will name.
    status = entry.stat(follow_symlinks=not dangling)
    content.images.append(ImageFile(path, status.st_size, status.st_mtime_ns))


def in_order(name: str) -> tuple[str, str]:
    """The key that names are sorted by, however a file system spells their accents."""
    return unicodedata.normalize("NFC", name), name


def shown(path: Path | str) -> str:
    """A path for a message of one line: quoted if it holds what cannot be printed."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def fingerprint(images: Sequence[ImageFile], decoding: Decoding, decoder: str) -> str:
    """A hash of what the decoded array depends on: paths, sizes, times and settings."""
    digest = hashlib.blake2b(f"{decoder} {decoding.size} {decoding.mode}".encode(), digest_size=12)
    for path, size, modified_ns in images:
        digest.update(f"{path}\0{size} {modified_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def decode(path: Path, decoding: Decoding) -> Decoded:
    """One image file as :func:`pixels_of` it; raises whatever Pillow raises for damaged bytes."""
    with Image.open(path) as opened:
        # A JPEG much larger than wanted is decoded at a half, a quarter or an eighth of its size.
        opened.draft(None, (2 * decoding.size, 2 * decoding.size))
        return pixels_of(opened, decoding)


def pixels_of(opened: Image.Image, decoding: Decoding) -> Decoded:
    """One image as uint8 ``[size, size]`` or ``[size, size, 3]``.

    It is turned upright as its EXIF data says, transparent parts become white, 16 or 12 bits 8,
    the first picture of an animation is taken. Its shorter side becomes ``size`` pixels long, and
    what the longer one has more is cut off on both ends: proportions are kept. Raises
    ``ValueError`` for pixels whose range nobody knows.
    """
    size = decoding.size
    image, highest = _eight_bits(opened)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB" if decoding.mode == "rgb" else "L")
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    return Decoded(np.asarray(fitted, dtype=np.uint8), highest)


def _eight_bits(opened: Image.Image) -> tuple[Image.Image, int]:
    """An image upright and with 8 bits, and `Decoded.highest`.

    Pillow cuts values of 16 bits off at 255, it does not scale them; those of colours it scales.
    """
    tiles = getattr(opened, "tile", None)  # until it is loaded
    stored = str(tiles[0][3]) if tiles else ""
    image = ImageOps.exif_transpose(opened)
    if image.mode == "F":
        raise ValueError("floating-point pixels: their range is not known")
    if not image.mode.startswith("I"):
        if ";16" not in stored or not image.mode.startswith("RGB"):
            return image, 0
        return image, 256 * max(
            most for _, most in np.reshape(image.getextrema(), (-1, 2))[:3].tolist()
        ) + 255
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError("pixels of more than 16 bits: their range is not known")
    twelve = "I;12" in stored
    step = 4095 / 255 if twelve else 257
    scaled = Image.fromarray((pixels / step).round().astype(np.uint8))
    return scaled, 0 if twelve else int(pixels.max())


def too_dark(highest: Iterable[int]) -> str:
    """Say that images, by `Decoded.highest`, use a few of their 16 bits alone; "" if they do not.

    Which bits are used no PNG file says for sure. One image may be dark; all of a set are not.
    """
    deep = [value for value in highest if value]
    if not deep or max(deep) > 4095:
        return ""
    bits = 8 if max(deep) < 256 else 12
    return (
        f"{counted(len(deep), 'image')} of 16 bits a value, none of which is above {max(deep)}: "
        f"as 16 bits they are black. If they have {bits} bits, multiply the values by "
        f"{2 ** (16 - bits)}, or save images of 8 bits"
    )


def decode_all(
    root: Path, images: Sequence[ImageFile], decoding: Decoding
) -> Iterator[NDArray[np.uint8]]:
    """All images in order, in chunks: uint8 ``[n, *decoding.shape]``.

    One thread for each core: Pillow decodes and resizes outside the interpreter's lock. Raises
    :class:`DataError` at the end if images are damaged, naming some of them, and a file that lists
    them where they are many; and if they are :func:`too_dark`.
    """
    damaged: list[str] = []
    highest: list[int] = []

    def chunk(files: Sequence[ImageFile]) -> tuple[NDArray[np.uint8], list[str]]:
        pixels = np.zeros((len(files), *decoding.shape), dtype=np.uint8)
        wrong = []
        for place, file in enumerate(files):
            try:
                pixels[place], most = decode(root / file.path, decoding)
                highest.append(most)
            # Pillow's readers meet damaged bytes with errors of every kind.
            except Exception as error:
                wrong.append(f"{shown(root / file.path)} ({_reason(error)})")
        return pixels, wrong

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chunks = (images[start : start + _CHUNK] for start in range(0, len(images), _CHUNK))
    executor = ThreadPoolExecutor(cores or 1, thread_name_prefix="decode")
    waiting: collections.deque[Future[tuple[NDArray[np.uint8], list[str]]]] = collections.deque()
    with warnings.catch_warnings():
        # About odd EXIF data and large images; what matters is whether they can be decoded.
        warnings.simplefilter("ignore")
        try:
            more = True
            while more or waiting:
                # Few ahead: the pixels of a large folder do not fit into memory.
                while more and len(waiting) < 3 * (cores or 1):
                    files = next(chunks, None)
                    if files is None:
                        more = False
                    else:
                        waiting.append(executor.submit(chunk, files))
                if waiting:
                    pixels, wrong = waiting.popleft().result()
                    damaged += wrong
                    yield pixels
        finally:
            executor.shutdown(cancel_futures=True)
    if damaged:
        raise DataError(_damage(damaged, len(images)))
    if dark := too_dark(highest):
        raise DataError(f"{shown(root)}: {dark}")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow knows"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _damage(damaged: list[str], of: int) -> str:
    """The line about images that cannot be decoded; a file takes those for which it has no room."""
    named = "; ".join(damaged[:_NAMED])
    if len(damaged) > _NAMED:
        path = cache_root() / "folder" / "damaged.txt"
        more = f"; and {len(damaged) - _NAMED} more"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in damaged), encoding="utf-8")
            more += f", all of them listed in {path}"
        except OSError:
            pass
        named += more
    return (
        f"{len(damaged)} of {of} images cannot be decoded: {named}: repair them or move them away"
    )


def say_ignored(root: Path, others: Counter[str]) -> None:
    """Say on standard error what besides images of classes is there, if anything is."""
    if total := others.total():
        kinds = [f"{n} {kind}" for kind, n in others.most_common(_NAMED) if n]
        one, many = "file or folder that is no image", "files or folders that are no images"
        what = counted(total, f"{one} of a class", f"{many} of a class")
        more = ", …" if len(+others) > len(kinds) else ""
        print(
            f"{shown(root)}: ignored {what}: {', '.join(kinds)}{more}",
            file=sys.stderr,
            flush=True,
        )
