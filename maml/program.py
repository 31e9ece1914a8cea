"""How a command ends: one line for bad input, an exit code, and no hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from datasets.errors import DataError
from maml.errors import UserError, WorkerLostError


def run_program(main: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Call ``main(arguments)`` and exit: 0 well, 1 a lost worker, 2 bad input, 130 interrupted.

    ``main`` may return an exit code. Under torchrun every process meets the same bad input, and
    rank zero alone says it.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        code = main(arguments)
    except (UserError, DataError) as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr)
        _exit(2)
    except WorkerLostError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None and "timed out" not in str(error):
            print(f"{error.__cause__}", file=sys.stderr)
        _exit(1)
    except KeyboardInterrupt:
        if speaks:
            print("interrupted", file=sys.stderr)
        _exit(130)
    _exit(code if isinstance(code, int) else 0)


def _exit(code: int) -> None:
    """End now where other processes exist: a broken transport's threads would hold us up."""
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
