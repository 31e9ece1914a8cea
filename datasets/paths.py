"""Where data sets and caches are by default. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_root() -> Path:
    """The folder of decoded copies: ``$MAML_CACHE``, else ``~/.cache/maml``."""
    return Path(os.environ.get("MAML_CACHE") or Path.home() / ".cache" / "maml").expanduser()


def default_data_root() -> Path:
    """The folder of data sets by default: ``$MAML_DATA``, else ``~/.cache/maml``; absolute."""
    root = Path(os.environ.get("MAML_DATA") or Path.home() / ".cache" / "maml")
    return root.expanduser().absolute()


@contextlib.contextmanager
def to_download_into(folder: Path, lock: Path) -> Iterator[None]:
    """Make ``folder``, and hold the file lock ``lock`` inside, for what is downloaded there.

    Should that fail, as it does where the folder's name was mistyped, what was made and holds
    nothing is gone again. Raises ``HeldError``, an ``OSError``, while a process that was stopped
    holds the lock.
    """
    # Imported late: the default folders are known without it.
    from datasets.locks import Lock

    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
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
