"""Downloads: one process at a time, none that waits for ever, and one line where one fails."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from datasets.errors import DataError
from datasets.locks import Lock

_TIMEOUT_S = 30.0


@contextlib.contextmanager
def downloading(folder: Path, missing: str, put: str) -> Iterator[None]:
    """Make ``folder``, and hold its lock, for what is downloaded there and read.

    Where that fails, a line says what is ``missing``, and what the user may ``put`` where instead.
    """
    # torchvision's downloads have no time limit of their own.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / ".download.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Lock(lock).held(needed=True):
            yield
    # What a failed download, or unreadable bytes of one, raise is of every kind.
    except Exception as error:
        if made:  # as where the folder's name was mistyped
            lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                for path in made:
                    path.rmdir()
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{missing}, and was not downloaded ({reason}); put {put}, or point --data-root or "
            f"$MAML_DATA at a folder that has {folder.name}/, or connect this machine to the "
            "network so that it downloads; *-glyphs-* presets (maml-glyphs-5way-1shot) need none"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
