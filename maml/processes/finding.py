"""Why all processes of a run end: the line that one of them says, and how it is said."""

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from datasets.errors import DataError
from maml.errors import UserError, WorkerLostError

T = TypeVar("T")


class Finding(NamedTuple):
    """Why processes are to end: the line, which rank was lost, if one was, and the exit code."""

    line: str
    rank: int | None = None
    code: int = 1

    @classmethod
    def read(cls, text: bytes) -> "Finding":
        """Return what `json.dumps` made of one."""
        return cls(*json.loads(text))


def exit_code(error: BaseException) -> int:
    """Return the exit code of all processes of a run where one fails by ``error``."""
    if isinstance(error, WorkerLostError):
        return error.code
    return 2 if isinstance(error, (UserError, DataError)) else 1


def say(line: str) -> None:
    """Print a line; a bar may be drawn at this moment."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return ``action()``, or ``otherwise`` if it fails or takes longer: a store may be frozen."""
    found = [otherwise]

    def act() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            found[0] = action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]
