"""How a command ends: one line for bad input, an exit code, and no hang."""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable

from datasets.theirs import described
from maml.errors import Done, UserError, WorkerLostError
from maml.processes import streams, system
from maml.processes.launcher import let_it_be_named, tell_launcher

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
    streams.install()
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
    except Done as done:
        code = done.code
    except KeyboardInterrupt:
        if speaks:
            print("interrupted", file=sys.stderr)
        _exit(130)
    except SystemExit as error:
        # Code of a user's own, in the middle of the work: its code 0 would say that all is done.
        _say(UserError(f"the program was told to end: {described(error)}"))
        # The system keeps the code's lowest eight bits.
        _exit((error.code % 256 or 1) if isinstance(error.code, int) else 1)
    except BaseException:
        if not _has_peers():
            raise
        # A normal exit would wait for the transport's threads.
        traceback.print_exc()
        _exit(1)
    if not code and speaks and (failure := streams.lost()):
        _say(UserError(f"standard output: {failure.strerror}"))
        _exit(2)
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
    """Print the line, also where torchrun sums up."""
    line = f"error: {error}"
    print(line, file=sys.stderr)
    tell_launcher(line)


def _exit(code: int) -> None:
    """Exit; after a failure among peers at once, because a broken transport's threads may block."""
    if code and _has_peers():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_peers() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"
