"""Keep decoded arrays, and other files, in a folder on disk, and build each of them once.

When many workers want the same file, one worker builds it under a file lock and renames it into
place; the others wait and open it. A crash, a full disk or a kill leaves at most a temporary file.
The next builder removes that file. A digest detects later damage; then the file is built again.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from datasets import whole
from datasets.errors import DataError
from datasets.locks import Lock
from datasets.paths import cache_root
from datasets.words import reason

# A builder that works for longer counts as hanging, and other workers build the same array.
LIMIT_S = 3600.0

Chunks = Iterable[NDArray[np.uint8]]
Mapped: TypeAlias = "np.memmap[Any, np.dtype[np.uint8]]"
Opened = TypeVar("Opened")

_checked: set[tuple[Path, int, int, int]] = set()  # (path, inode, size, ctime) that passed


def cached(name: str, shape: tuple[int, ...], build: Callable[[], Chunks], title: str) -> Mapped:
    """Return the cache's uint8 array ``name``, a path that ends in ``.npy``; build a missing one.

    ``build()`` yields uint8 chunks that fill ``shape`` in order. The builder prints ``title`` to
    standard error. Raise :class:`DataError` when the cache cannot be written. Errors of
    ``build`` pass through. In both cases no part of the array is left behind.
    """
    path = cache_root() / name
    opened, write = partial(_map_checked, path, shape), partial(_write, path, shape, build, title)
    try:
        return built_once(path, opened, write, "built anew")
    except OSError as error:
        raise DataError(
            f"{path}: cannot write the cache ({reason(error)}); free space there, "
            "or set $MAML_CACHE to a folder that can be written"
        ) from error


def built_once(
    path: Path, opened: Callable[[], Opened], build: Callable[[], None], how: str
) -> Opened:
    """Return what ``opened`` makes of a file; one process builds a missing or damaged file.

    ``opened`` raises ``OSError`` or ``ValueError`` then, and a line says ``how`` it is mended.
    """
    with contextlib.suppress(OSError, ValueError):
        return opened()
    path.parent.mkdir(parents=True, exist_ok=True)
    with Lock(Path(f"{path}.lock")).held(limit=LIMIT_S) as alone:
        # Another process may have built it while this one waited for the lock.
        try:
            return opened()
        except (OSError, ValueError) as error:
            if path.exists():
                why = reason(error).removeprefix(f"{path}: ")
                print(f"{path}: {why}; it is {how}", file=sys.stderr, flush=True)
        if alone:
            whole.sweep(path)
        build()
    return opened()


def _map_checked(path: Path, shape: tuple[int, ...]) -> Mapped:
    """Map a file, after one check of its digest. Raise ``ValueError`` if the file is bad."""
    status = path.stat()
    stamp = path, status.st_ino, status.st_size, status.st_ctime_ns
    if stamp not in _checked:
        whole.unseal(np.memmap(path, np.uint8, "r").data)
        _checked.add(stamp)
    array: Mapped = np.load(path, mmap_mode="r")
    if array.shape != shape or array.dtype != np.uint8:
        expected = f"uint8 {list(shape)} is expected"
        raise ValueError(f"holds {array.dtype} {list(array.shape)} where {expected}")
    return array


def _write(path: Path, shape: tuple[int, ...], build: Callable[[], Chunks], title: str) -> None:
    """Write a ``.npy`` file with its digest. The file appears whole or not at all."""
    # Print this before build(), because build() may take most of the time.
    print(f"{title}, once: {path} keeps it", file=sys.stderr, flush=True)
    # On a full disk, a write raises ENOSPC, but a writable memory map would kill the process.
    size = math.prod(shape)
    with (
        whole.written(path) as temporary,
        open(temporary, "w+b") as file,
        _progress(size, title) as update,
    ):
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        begin = file.tell()
        for chunk in build():
            update(file.write(np.ascontiguousarray(chunk).data))
        file.flush()
        if (written := file.tell() - begin) != size:
            raise ValueError(f"{path.name}: built {written} bytes of {size}")
        file.write(whole.digest(np.memmap(file, np.uint8, "r").data))


@contextlib.contextmanager
def _progress(size: int, title: str) -> Iterator[Callable[[int], object]]:
    """Show a bar of bytes on a terminal, if tqdm is there; yield what takes each chunk's number."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # the library alone
        yield lambda _: None
        return
    with tqdm(total=size, desc=title, unit="B", unit_scale=True, delay=2.0, disable=None) as bar:
        yield bar.update
