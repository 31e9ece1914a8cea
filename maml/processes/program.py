"""How a command ends: one line for bad input, an exit code, and no hang."""

import contextlib
import io
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
from maml.processes import system
from maml.processes.launcher import let_it_be_named

# At import, because the setting has no effect once torch is loaded. So a program that imports torch
# imports this module first.
system.spin_briefly()

_NO_MEMORY = ("failed to map segment", "allocate memory", "bad_alloc", "can't start new thread")
"""Words in the errors of libraries that got no memory. They share no exception type."""

RANK_ZERO_GRACE = 20.0
"""Another rank waits this many seconds for rank 0 to report the same bad input."""


def run_program(main: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Call ``main(arguments)`` and exit: 0 success, 1 lost worker, 2 bad input, 130 interrupted.

    ``main`` may return an exit code. Under torchrun every process meets the same bad input, and
    only rank 0 prints it. Another rank prints an input error that rank 0 does not meet.
    """
    speaks = os.environ.get("RANK", "0") == "0" or not _has_peers()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be UTF-8
    try:
        code = _within_limits(main, arguments)
    except UserError as error:
        if not speaks:
            # The launcher ends all processes once one has failed. So if this process exited at
            # once, rank 0 might end before it has printed the error.
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
        # The reader, such as `head`, has closed the pipe. The interpreter would complain at exit.
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
    """Return ``main(arguments)``; raise `UserError` if memory ran out, as when libraries load."""
    try:
        return main(arguments)
    except Exception as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        told = isinstance(error, MemoryError) or any(word in str(error) for word in _NO_MEMORY)
        # Without a limit on addresses, a limit on processes is why a thread cannot start.
        if not told or (limit == resource.RLIM_INFINITY and "thread" in str(error)):
            raise
        reason = " ".join(str(error).split())[-100:] or "MemoryError"
        if limit == resource.RLIM_INFINITY:
            raise UserError(
                f"the system has no more memory ({reason}): use a smaller network, --task-batch "
                "or task"
            ) from error
        raise UserError(
            f"ulimit -v {limit // 1024}: limits addresses to {limit / 2**30:.1f} GiB (RLIMIT_AS), "
            f"and libraries need several GiB ({reason}); raise it"
        ) from error


def _say(error: Exception) -> None:
    """Print the line; also write it to this process's error file: torchrun shows the first one."""
    line = f"error: {error}"
    print(line, file=sys.stderr)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))


def _exit(code: int) -> None:
    """Exit; after a failure among peers at once, because a broken transport's threads may block."""
    if code and _has_peers():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_peers() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"
