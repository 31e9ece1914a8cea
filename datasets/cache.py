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
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from datasets import digest, whole
from datasets.errors import DataError
from datasets.locks import Lock
from datasets.paths import cache_root

# A builder that works for longer hangs: another one builds the same.
LIMIT_S = 3600.0

Chunks = Iterable[NDArray[np.uint8]]
Mapped: TypeAlias = "np.memmap[Any, np.dtype[np.uint8]]"
Stamp: TypeAlias = tuple[int, int, int, int]
"""What is another one when a file was written to or replaced."""

_checked: set[tuple[Path, Stamp]] = set()
"""What this process knows to be as it was written."""


def cached(
    name: str, shape: tuple[int, ...], build: Callable[[], Chunks], *, title: str = ""
) -> Mapped:
    """The uint8 array ``name`` of the cache, built on the first call of any process.

    ``name`` is a relative path ending in ``.npy``. ``build()`` yields uint8 chunks that fill
    ``shape`` in order. A damaged cache file is built anew, after a line that says so. The process
    that builds says so on standard error, as ``title`` calls it, and shows on a terminal how far it
    is.

    Raises :class:`DataError` naming the file and ``$MAML_CACHE`` when the cache cannot be written;
    errors of ``build`` pass through. In either case nothing is left behind.
    """
    path = cache_root() / name
    with contextlib.suppress(DataError):
        return _map_checked(path, shape)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with Lock(Path(f"{path}.lock")).held(limit=LIMIT_S):
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
            _write(path, shape, build(), title)
    except OSError as error:
        raise DataError(
            f"{path}: cannot write the cache ({error.strerror or error}); free space there, "
            "or set $MAML_CACHE to a folder that can be written"
        ) from error
    return _map_checked(path, shape)


def _map_checked(path: Path, shape: tuple[int, ...]) -> Mapped:
    """Map a file read-only, once this process has compared it with its digest.

    Raises :class:`DataError` naming the file if it is damaged, has no digest, cannot be read, or
    does not hold exactly ``shape``.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            stamp = status.st_ino, status.st_size, status.st_ctime_ns, status.st_mtime_ns
            if (path, stamp) not in _checked:
                for _ in _followed(digest.check(file), status.st_size, f"checking {path.name}"):
                    pass
                _checked.add((path, stamp))
            np.lib.format.read_magic(file)
            found, _, dtype = np.lib.format.read_array_header_1_0(file)
            if found != shape or dtype != np.uint8:
                raise ValueError(
                    f"holds {dtype} {list(found)} where uint8 {list(shape)} is expected"
                )
            return np.memmap(file, np.uint8, "r", file.tell(), shape)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _followed(sizes: Iterable[int], total: int, title: str) -> Iterator[int]:
    """Numbers of bytes, with a progress bar on a terminal."""
    from tqdm import tqdm

    quiet = None if title else True  # None: where there is no terminal
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=2.0, disable=quiet) as bar:
        for size in sizes:
            yield size
            bar.update(size)


def _write(path: Path, shape: tuple[int, ...], chunks: Chunks, title: str) -> None:
    """Write a ``.npy`` file, with its digest, that appears whole or not at all.

    Plain writes, not a writable memory map: on a full disk a write raises ``ENOSPC``, a mapped page
    kills the process.
    """
    with whole.written(path) as temporary, open(temporary, "w+b") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": shape}
        )

        def write() -> Iterator[int]:
            for chunk in chunks:
                if (
                    chunk.dtype != np.uint8
                    or chunk.shape[1:] != shape[len(shape) - chunk.ndim + 1 :]
                ):
                    raise ValueError(
                        f"{path.name}: a chunk is {chunk.dtype} {chunk.shape}, not uint8 of {shape}"
                    )
                yield file.write(np.ascontiguousarray(chunk).data)

        written = sum(_followed(write(), math.prod(shape), title))
        if written != math.prod(shape):
            raise ValueError(f"{path.name}: built {written} bytes of {math.prod(shape)}")
        file.flush()
        file.write(digest.sealed(digest.of_blocks(file)))
