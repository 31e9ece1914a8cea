"""Where decoded arrays live on disk, and how they get there exactly once.

Many workers start at the same moment and all want the same array. One of them builds it under a
file lock and renames it into place; the others wait and map it. A file in the cache is therefore
always whole: a crash, a full disk or a kill leaves at most a temporary file, which the next builder
removes.

What happens to it later, on a disk that loses bits or by another program, is found by its digest:
each process checks a file before it maps it first. A damaged file is built anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from datasets import digest, whole
from datasets.errors import DataError
from datasets.locks import Lock
from datasets.paths import cache_root

# A builder that has written nothing for so long hangs: another one builds the same.
LIMIT_S = 900.0
# Between two lines that say how far a build is, where no terminal shows a bar.
REPORT_S = 30.0

Chunks = Iterable[NDArray[np.uint8]]
Part = TypeVar("Part", NDArray[np.uint8], int)
Mapped: TypeAlias = "np.memmap[Any, np.dtype[np.uint8]]"
Stamp: TypeAlias = tuple[int, int, int, int]
"""What is another one when a file was written to or replaced."""

_checked: set[tuple[Path, Stamp]] = set()
"""What this process knows to be as it was written."""


def map_array(path: Path, shape: tuple[int, ...]) -> Mapped:
    """Map a uint8 ``.npy`` file read-only.

    Raises :class:`DataError` naming the file unless it holds exactly ``shape``.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable .npy array ({error})") from error
    if not isinstance(array, np.memmap) or array.shape != shape or array.dtype != np.uint8:
        found = (
            f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        )
        raise DataError(f"{path}: holds {found} where uint8 {list(shape)} is expected")
    return array


def cached(
    name: str, shape: tuple[int, ...], build: Callable[[], Chunks], *, title: str = ""
) -> Mapped:
    """The uint8 array ``name`` of the cache, built on the first call of any process.

    ``name`` is a relative path ending in ``.npy``. ``build()`` yields uint8 chunks that fill
    ``shape`` along its first dimension. A damaged cache file is built anew, after a line that says
    so. The process that builds says so on standard error, as ``title`` calls it, and shows on a
    terminal how far it is.

    Raises :class:`DataError` naming the file and ``$MAML_CACHE`` when the cache cannot be written;
    errors of ``build`` pass through. In either case nothing is left behind.
    """
    path = cache_root() / name
    with contextlib.suppress(DataError):
        return _map_checked(path, shape)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(Path(f"{path}.lock"))
        with lock.held(limit=LIMIT_S):
            # Another process may have built it while this one waited for the lock.
            try:
                return _map_checked(path, shape)
            except DataError as error:
                if path.exists():
                    print(f"{error}; it is built anew", file=sys.stderr, flush=True)
            whole.sweep(path)
            if title:
                # Before build(), which may be most of it.
                print(f"{title}, once: {path} keeps it", file=sys.stderr, flush=True)
            _write(path, shape, _followed(_extending(lock, build()), shape[0], title))
    except OSError as error:
        raise DataError(
            f"{path}: cannot write the cache ({error.strerror or error}); free space there, "
            "or set $MAML_CACHE to a folder that can be written"
        ) from error
    return _map_checked(path, shape)


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns


def _check(path: Path) -> Stamp:
    """Compare a file of the cache with its digest, once in this process.

    Returns the stamp of the file that was compared. Raises :class:`DataError` naming it if it is
    damaged, has no digest or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))
            if (path, stamp) not in _checked:
                _compare(path, file)
                _checked.add((path, stamp))
            return stamp
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _compare(path: Path, file: IO[bytes]) -> None:
    for _ in _followed(digest.check(file), digest.blocks(file), f"checking {path.name}"):
        pass


def _map_checked(path: Path, shape: tuple[int, ...]) -> Mapped:
    """:func:`map_array`, of a file that is as it was written."""
    while True:
        stamp = _check(path)
        array = map_array(path, shape)
        # Another builder may have put a new file in its place between the two.
        with contextlib.suppress(OSError):
            if _stamp(os.stat(path)) == stamp:
                return array


def _extending(lock: Lock, chunks: Chunks) -> Chunks:
    for chunk in chunks:
        lock.extend()
        yield chunk


def _followed(parts: Iterable[Part], total: int, title: str) -> Iterator[Part]:
    """``parts``, with a progress bar on a terminal, and a line now and then elsewhere.

    ``total``: how many rows they have together; a part that is a number has so many.
    """
    from tqdm import tqdm

    done, said = 0, time.monotonic()
    with tqdm(total=total, desc=title, delay=2.0, disable=None if title else True) as bar:
        for part in parts:
            yield part
            rows = part if isinstance(part, int) else len(part)
            done += rows
            bar.update(rows)
            if title and bar.disable and time.monotonic() - said >= REPORT_S:
                said = time.monotonic()
                print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)


def _write(path: Path, shape: tuple[int, ...], chunks: Chunks) -> None:
    """Write a ``.npy`` file, with its digest, that appears whole or not at all.

    Plain writes, not a writable memory map: on a full disk a write raises ``ENOSPC``, a mapped page
    kills the process.
    """
    with whole.written(path) as temporary, open(temporary, "wb") as file:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "|u1", "fortran_order": False, "shape": shape}
        )
        # Of what is meant to be written, not of what the disk has made of it.
        sealing, rows = digest.Digest(), 0
        sealing.update(header.getvalue())
        file.write(header.getvalue())
        for chunk in chunks:
            if chunk.dtype != np.uint8 or chunk.shape[1:] != shape[1:]:
                raise ValueError(
                    f"{path.name}: a chunk is {chunk.dtype} {chunk.shape}, not uint8 of {shape}"
                )
            data = np.ascontiguousarray(chunk).data
            sealing.update(data)
            file.write(data)
            rows += len(chunk)
        if rows != shape[0]:
            raise ValueError(f"{path.name}: built {rows} rows of {shape[0]}")
        file.write(sealing.seal())
