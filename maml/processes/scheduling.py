"""Whose turn it is on a core that several threads want (Linux; elsewhere nothing happens)."""

import contextlib
import os


def give_way() -> None:
    """Let no thread of this process displace another by waking up (``SCHED_BATCH``, sched(7)).

    It holds for the threads and processes that this one starts, too. Where workers compute on all
    cores, threads that wake up cost about 3 ms in a good part of all steps. A process with a policy
    of its own is left alone.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    # A sandbox may forbid it.
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def spin_briefly() -> None:
    """Let an OpenMP thread without work give its core back within about 50 µs; before torch loads.

    GNU's library lets it spin for milliseconds, while the kernels' threads wait for its core: that
    took 1.2 to 1.5 times as long. ``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY`` are left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
