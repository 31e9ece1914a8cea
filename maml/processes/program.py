"""How a command ends: one line for bad input, an exit code, and no hang."""

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from maml.errors import UserError, WorkerLostError
from maml.processes.launcher import let_it_be_named

_NO_MEMORY = ("failed to map segment", "allocate memory", "bad_alloc", "can't start new thread")
"""Words by which libraries tell that the system gave them no memory; they share no exception."""

RANK_ZERO_GRACE = 20.0
"""Seconds that another rank gives rank zero to meet the same bad input."""


def run_program(main: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Call ``main(arguments)`` and exit: 0 well, 1 a lost worker, 2 bad input, 130 interrupted.

    ``main`` may return an exit code. Under torchrun every process meets the same bad input, and
    rank zero alone says it; another rank says what rank zero does not meet.
    """
    speaks = os.environ.get("RANK", "0") == "0" or not _has_peers()
    try:
        code = _within_limits(main, arguments)
    except UserError as error:
        if not speaks:
            # The launcher ends all once one has failed. A process that left at once might take
            # rank zero with it before it has said why.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(RANK_ZERO_GRACE)
        _say(error)
        _exit(2)
    except WorkerLostError as error:
        let_it_be_named()
        if str(error):
            _say(error)
        _exit(error.code)
    except BrokenPipeError:
        # Whoever reads has enough, as `head` has; the interpreter would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(0)
    except Exception:
        if not _has_peers():
            raise
        # A normal exit would wait for the transport's threads.
        traceback.print_exc()
        _exit(1)
    except KeyboardInterrupt:
        if speaks:
            print("interrupted", file=sys.stderr)
        _exit(130)
    _exit(code if isinstance(code, int) else 0)


def _within_limits(main: Callable[[list[str]], object], arguments: list[str]) -> object:
    """Return ``main(arguments)``; raise `UserError` where memory ends: libraries do not load."""
    try:
        return main(arguments)
    except Exception as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        told = isinstance(error, MemoryError) or any(word in str(error) for word in _NO_MEMORY)
        # Without a limit of addresses, threads end at one of processes.
        if not told or (limit == resource.RLIM_INFINITY and "thread" in str(error)):
            raise
        reason = " ".join(str(error).split())[-100:] or "MemoryError"
        if limit == resource.RLIM_INFINITY:
            raise UserError(
                f"the system gives no more memory ({reason}): a smaller network, --task-batch or "
                "task needs less"
            ) from error
        raise UserError(
            f"ulimit -v {limit // 1024}: memory ends at this limit of {limit / 2**30:.1f} GiB of "
            f"addresses (RLIMIT_AS), and libraries need several ({reason}); raise it"
        ) from error


def _say(error: Exception) -> None:
    """Print the line; leave it to torchrun, too: its page shows the first process's error file."""
    line = f"error: {error}"
    print(line, file=sys.stderr)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))


def _exit(code: int) -> None:
    """End now where other processes exist: a broken transport's threads would hold us up."""
    if code and _has_peers():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_peers() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"
