"""Write files that appear whole or not at all, even if the power fails, and detect later damage.

A file ends in a digest of the digests of its blocks, so that several threads can compute the
digest. A reader of a ``.npy`` array ignores bytes after the array. Nothing here imports torch.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

MAGIC = b"\nsha256 of 4 MB\n"
BLOCK = 1 << 22
SIZE = len(MAGIC) + hashlib.sha256().digest_size  # bytes of a digest at the end of a file

Content = TypeVar("Content", bytes, memoryview)


def regular(path: Path) -> Path:
    """Return a path to read; raise ``OSError`` for a pipe or a device, which may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path


def no_link(path: Path) -> Path:
    """Return a path to write to; raise ``OSError`` for a symbolic link, which may lead anywhere."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, so nothing is written there", str(path))
    return path


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a file to write to. It is renamed to ``path`` at the end, or removed after an error."""
    # A new file: a link or a folder with a name that could be guessed may be there already.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        try:
            _sync(temporary)
            os.replace(temporary, path)
        except FileNotFoundError:
            # Another process took this one for dead, removed `temporary`, and wrote `path` itself.
            if not path.exists():
                raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    with contextlib.suppress(OSError):  # not every folder can be synced
        _sync(path.parent)


def sweep(path: Path) -> None:
    """Remove the files that killed writers of ``path`` left; no process may write ``path`` now."""
    for stale in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            stale.unlink()


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def digest(content: Content) -> bytes:
    """Return the digest that follows ``content`` in a file, computed on all cores."""
    blocks = (content[start : start + BLOCK] for start in range(0, len(content), BLOCK))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "digest") as threads:
        digests = threads.map(lambda block: hashlib.sha256(block).digest(), blocks)
        return MAGIC + hashlib.sha256(b"".join(digests)).digest()


def seal(content: bytes) -> bytes:
    """Return ``content`` followed by its digest."""
    return content + digest(content)


def unseal(content: Content) -> Content:
    """Return the content of a file that ends in its digest, or raise ``ValueError``."""
    end = bytes(content[-SIZE:])
    if not end.startswith(MAGIC):
        raise ValueError("it has no digest: cut short, or written by an earlier version")
    if end != digest(content[:-SIZE]):
        raise ValueError("its digest does not match: the file is damaged")
    return content[:-SIZE]
