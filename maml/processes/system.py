"""What a process asks of its system at its start, before torch is imported: memory, and turns."""

import contextlib
import ctypes
import os
import sys

# malloc.h; glibc takes no larger threshold than this for mmap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 2**31 - 1


def keep_memory() -> bool:
    """Keep freed memory within the process; return whether the C library does so (glibc only).

    Training drops megabytes thousands of times a second. By default glibc returns such blocks to
    the kernel and pages the next ones in again, zeroed: up to a third of the time. Large blocks get
    huge pages where the system grants them. Threads share as many pools as there are cores: calls
    over RPC come in on many, and each would page in its own.

    glibc's own variables and torch's ``THP_MEM_ALLOC_ENABLE`` override; ``MAML_ALLOCATOR=off``
    leaves all alone.
    """
    if os.environ.get("MAML_ALLOCATOR") == "off" or not sys.platform.startswith("linux"):
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    taken = True
    for variable, parameter, value in (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _MMAP_BYTES),
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _TRIM_BYTES),
        ("MALLOC_ARENA_MAX", _M_ARENA_MAX, os.cpu_count() or 1),
    ):
        if variable not in os.environ:
            taken = bool(mallopt(parameter, value)) and taken
    return taken


def give_way() -> None:
    """Let no thread of this process displace another by waking up (``SCHED_BATCH``, sched(7)).

    Holds for the calling thread and those that it starts from here on, processes too; their share
    of the cores stays the same. Where workers compute on all cores, a thread that wakes up (gloo's
    loop, a driver, the next tasks) has cost the one that all wait for a time slice of 3 ms, in a
    good part of all steps. A process that has a policy of its own is left alone.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return  # not Linux
    # A sandbox may forbid it.
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def spin_briefly() -> None:
    """Let an OpenMP thread without work give its core back within about 50 µs; before torch loads.

    GNU's library lets it spin for milliseconds, on a core that the kernels' threads want next:
    evaluating tasks on two cores took 1.2 to 1.5 times as long. Spinning a little still pays
    between small operations. The user's own ``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY`` stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
