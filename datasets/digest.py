"""A digest at the end of a file: flipped bytes are found before anybody learns from them.

The digest is of digests of blocks, so that several threads can check a file at once. It lies behind
the contents, in the same file: what reads a ``.npy`` array does not look beyond its end, and one
file is renamed into place as a whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

MAGIC = b"\nsha256 of 4 MB\n"
BLOCK = 1 << 22
SIZE = len(MAGIC) + hashlib.sha256().digest_size
"""Bytes that `Digest.seal` returns."""
_NONE = "it has no digest: cut short, or written by an earlier version"
_OTHER = "its digest is another one: the file is damaged"


class Digest:
    """The digest of what is written bit by bit."""

    def __init__(self) -> None:
        self._blocks, self._block, self._room = hashlib.sha256(), hashlib.sha256(), BLOCK

    def update(self, data: bytes | memoryview) -> None:
        """Take the bytes that come next."""
        rest = memoryview(data).cast("B")
        while len(rest):
            part, rest = rest[: self._room], rest[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._close_block()

    def seal(self) -> bytes:
        """Return what to write at the end of the file."""
        if self._room < BLOCK:
            self._close_block()
        return MAGIC + self._blocks.digest()

    def _close_block(self) -> None:
        self._blocks.update(self._block.digest())
        self._block, self._room = hashlib.sha256(), BLOCK


def seal(content: bytes) -> bytes:
    """Return the content of a small file with its digest behind it."""
    digest = Digest()
    digest.update(content)
    return content + digest.seal()


def unseal(sealed: bytes) -> bytes:
    """Return the content of a small file that ends in its digest.

    Raises:
        ValueError: saying what is wrong.
    """
    content = sealed[:-SIZE]
    if not sealed[-SIZE:].startswith(MAGIC):
        raise ValueError(_NONE)
    if sealed != seal(content):
        raise ValueError(_OTHER)
    return content


def blocks(file: IO[bytes]) -> int:
    """Return how many blocks `check` looks at."""
    return -(-max(os.fstat(file.fileno()).st_size - SIZE, 0) // BLOCK)


def check(file: IO[bytes]) -> Iterator[int]:
    """Compare a file with its digest, on all cores; yield 1 for each block that was read.

    Read, not mapped: a page that the disk cannot give raises ``OSError``, a mapped one kills the
    process.

    Raises:
        ValueError: at the end, saying what is wrong.
        OSError: if a part cannot be read.
    """
    number = file.fileno()
    end = os.fstat(number).st_size - SIZE
    sealed = os.pread(number, SIZE, max(end, 0))
    if end < 0 or not sealed.startswith(MAGIC):
        raise ValueError(_NONE)

    def of_block(start: int) -> bytes:
        return hashlib.sha256(os.pread(number, min(BLOCK, end - start), start)).digest()

    whole = hashlib.sha256()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "digest") as threads:
        for digest in threads.map(of_block, range(0, end, BLOCK)):
            whole.update(digest)
            yield 1
    if sealed != MAGIC + whole.digest():
        raise ValueError(_OTHER)
