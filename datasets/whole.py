"""Files that appear whole or not at all, even if the power fails. Nothing here imports torch."""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a file to write to. It is renamed to ``path`` at the end, or removed after an error."""
    temporary = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.tmp")
    temporary.touch()
    try:
        yield temporary
        try:
            _sync(temporary)
            os.replace(temporary, path)
        except FileNotFoundError:
            # Another process has taken this for dead, swept it up, and written the file itself.
            if not path.exists():
                raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    with contextlib.suppress(OSError):  # not every folder can be synced
        _sync(path.parent)


def sweep(path: Path) -> None:
    """Remove what processes killed while they wrote ``path`` have left; nobody may write it now."""
    for stale in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            stale.unlink()


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
