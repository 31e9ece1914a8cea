"""Whose turn it is on a core that several threads want (Linux; elsewhere nothing happens)."""

import contextlib
import os


def give_way() -> None:
    """Let no thread of this process displace another by waking up (``SCHED_BATCH``, sched(7)).

    Holds for the calling thread and those that it starts from here on, processes too; their share
    of the cores stays the same. Where workers compute on all cores, a thread that wakes up (gloo's
    loop, a driver, the next tasks) has cost the one that all wait for a time slice of 3 ms, in a
    good part of all steps. A process that has a policy of its own is left alone.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
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
