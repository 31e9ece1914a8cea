"""Downloads: one process at a time, none that waits for ever, and nothing left where one fails."""

from __future__ import annotations

import contextlib
import http.client
import socket
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from datasets.locks import Lock

_TIMEOUT_S = 30.0

FAILURES = (
    OSError,
    AssertionError,
    RuntimeError,
    ValueError,
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zlib.error,
)
"""What a failed download, or unreadable bytes of one, raise."""


@contextlib.contextmanager
def downloading(folder: Path, lock: Path) -> Iterator[None]:
    """Make ``folder``, and hold the file lock ``lock`` inside, for what is downloaded there.

    Should that fail, as it does where the folder's name was mistyped, what was made and holds
    nothing is gone again. Raises ``HeldError``, an ``OSError``, while a process that was stopped
    holds the lock.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # torchvision's downloads have no time limit of their own.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        with Lock(lock).held(take=False):
            yield
    except BaseException:
        if made:
            lock.unlink(missing_ok=True)
            inside = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
            with contextlib.suppress(OSError):  # not empty
                for path in (*inside, *made):
                    path.rmdir()
        raise
    finally:
        socket.setdefaulttimeout(before)
