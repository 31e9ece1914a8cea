"""A digest at the end of a file: flipped bytes are found before anybody learns from them.

The digest is of digests of blocks, so that several threads can check a file at once. It lies behind
the contents, in the same file: what reads a ``.npy`` array does not look beyond its end, and one
file is renamed into place as a whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

MAGIC = b"\nsha256 of 4 MB\n"
BLOCK = 1 << 22
SIZE = len(MAGIC) + hashlib.sha256().digest_size
"""Bytes of a digest at the end of a file."""
_NONE = "it has no digest: cut short, or written by an earlier version"
_OTHER = "its digest is another one: the file is damaged"


def of_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """The digests of the blocks of a file without a digest at its end, computed on all cores.

    Read, not mapped: a page that the disk cannot give raises ``OSError``, a mapped one kills the
    process.
    """
    yield from _of_blocks(file, os.fstat(file.fileno()).st_size)


def seal(content: bytes) -> bytes:
    """Return the content of a small file with its digest behind it."""
    blocks = (content[start : start + BLOCK] for start in range(0, len(content), BLOCK))
    return content + sealed(hashlib.sha256(block).digest() for block in blocks)


def sealed(blocks: Iterable[bytes]) -> bytes:
    """Return what is written at the end of a file whose blocks have these digests."""
    return MAGIC + hashlib.sha256(b"".join(blocks)).digest()


def unseal(content: bytes) -> bytes:
    """Return the content of a small file that ends in its digest.

    Raises:
        ValueError: saying what is wrong.
    """
    if not content[-SIZE:].startswith(MAGIC):
        raise ValueError(_NONE)
    if content != seal(content[:-SIZE]):
        raise ValueError(_OTHER)
    return content[:-SIZE]


def check(file: IO[bytes]) -> Iterator[int]:
    """Compare a file with its digest; yield the bytes of each block that was read.

    Raises:
        ValueError: at the end, saying what is wrong.
        OSError: if a part cannot be read.
    """
    end = os.fstat(file.fileno()).st_size - SIZE
    found = os.pread(file.fileno(), SIZE, max(end, 0))
    if end < 0 or not found.startswith(MAGIC):
        raise ValueError(_NONE)
    blocks = []
    for block in _of_blocks(file, end):
        blocks.append(block)
        yield min(BLOCK, end - BLOCK * (len(blocks) - 1))
    if found != sealed(blocks):
        raise ValueError(_OTHER)


def _of_blocks(file: IO[bytes], end: int) -> Iterator[bytes]:
    def of_block(start: int) -> bytes:
        block = os.pread(file.fileno(), min(BLOCK, end - start), start)
        return hashlib.sha256(block).digest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "digest") as threads:
        yield from threads.map(of_block, range(0, end, BLOCK))
