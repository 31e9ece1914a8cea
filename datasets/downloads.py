"""Downloads: one process at a time, with a timeout, and a one-line error on failure."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from datasets.errors import DataError
from datasets.locks import Lock
from datasets.words import reason

_TIMEOUT_S = 30.0


@contextlib.contextmanager
def downloading(folder: Path, missing: str, put: str) -> Iterator[None]:
    """Make ``folder`` and hold its lock while the caller downloads and reads files there.

    On failure, a one-line error says what is ``missing`` and which files to ``put`` in which place.
    """
    # torchvision sets no timeout for its downloads.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / ".download.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Lock(lock).held(needed=True):
            yield
    # A failed download, or unreadable downloaded bytes, can raise errors of every kind.
    except Exception as error:
        if made:  # for example, the folder's name was mistyped
            with contextlib.suppress(OSError):  # not empty, or no folder can be made there
                lock.unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
        raise DataError(
            f"{missing}, and was not downloaded ({reason(error)}); put {put}, or point --data-root "
            f"or $MAML_DATA at a folder that has {folder.name}/, or connect this machine to the "
            "network so that it downloads; *-glyphs-* presets (maml-glyphs-5way-1shot) need none"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
