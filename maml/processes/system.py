"""Settings for memory and scheduling that a process makes at its start, before torch's import."""

import contextlib
import ctypes
import os
import sys

# Constants of malloc.h. For mmap, glibc accepts no larger threshold than `_MMAP_BYTES`.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 2**31 - 1


def keep_memory() -> None:
    """Keep freed memory within the process, if the C library can (glibc only).

    Training frees megabytes thousands of times a second. By default glibc returns such blocks to
    the kernel and pages the next blocks in again, zeroed. This took up to a third of the time.
    Large blocks get huge pages if the system grants them. Threads share as many pools as there are
    cores, because RPC calls arrive on many threads, and each thread would page in its own pool.

    glibc's own variables and torch's ``THP_MEM_ALLOC_ENABLE`` override these settings.
    ``MAML_ALLOCATOR=off`` turns all of them off.
    """
    if os.environ.get("MAML_ALLOCATOR") == "off" or not sys.platform.startswith("linux"):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for variable, parameter, value in (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _MMAP_BYTES),
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _TRIM_BYTES),
        ("MALLOC_ARENA_MAX", _M_ARENA_MAX, os.cpu_count() or 1),
    ):
        if variable not in os.environ:
            mallopt(parameter, value)


def give_way() -> None:
    """Let no thread of this process displace another by waking up (``SCHED_BATCH``, sched(7)).

    This holds for the calling thread and for the threads and processes that it starts later. Their
    share of the cores stays the same. When workers computed on all cores, a waking thread (gloo's
    loop, a driver, the next tasks) delayed the process that all others wait for by a time slice of
    3 ms, in many steps. If a process already has another policy, keep that policy.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return  # not Linux
    # A sandbox may forbid it.
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def spin_briefly() -> None:
    """Let an idle OpenMP thread release its core within about 50 µs. Call before torch loads.

    GNU's library lets such threads spin for milliseconds on cores that the kernels need next. So
    evaluating tasks on two cores took 1.2 to 1.5 times as long. A little spinning still pays
    between small operations. The user's own ``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY`` stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
