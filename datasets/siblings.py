"""What one process does for all that were started with it on the same host."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datasets.locks import Lock

# A check that takes so long hangs: another process makes it as well.
LIMIT_S = 900.0


class Stamp(NamedTuple):
    """What is another one when a file was written to or replaced."""

    inode: int
    size: int
    changed_ns: int
    touched_ns: int


def stamp(found: os.stat_result) -> Stamp:
    """Return the stamp of a file as ``os.stat`` found it."""
    return Stamp(found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns)


@contextlib.contextmanager
def once(path: Path, of: Stamp) -> Iterator[bool]:
    """Do something about a file once for this start of a run on this host.

    Yields whether a sibling has done it already, to this very file. The others wait meanwhile. It
    counts as done if the body raises nothing. Where no note can be left beside the file, everyone
    does it.
    """
    start = _start()
    if start is None:
        yield False
        return
    note = path.with_name(f".{path.name}.{platform.node()}.checked")
    with Lock(Path(f"{note}.lock")).held(limit=LIMIT_S):
        text, found = f"{start} {tuple(of)}", ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = note.read_text()
        yield found == text
        if found != text:
            with contextlib.suppress(OSError):
                note.write_text(text)


def _start() -> str | None:
    """Return what names this start on this host; None for a process that is alone.

    Siblings have a parent in common: torchrun, or what a cluster starts processes with. It may
    start them again, and its number may be used again.
    """
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    # Imported late: a process that is alone does without it.
    import psutil

    parent = os.getppid()
    try:
        since = psutil.Process(parent).create_time()
    except psutil.Error:
        return None
    names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    return " ".join([str(parent), str(since), *(os.environ.get(name, "") for name in names)])
