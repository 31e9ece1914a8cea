"""Whose turn it is on a core that several threads want (Linux; elsewhere nothing happens)."""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """Let no thread of this process displace another by waking up (``SCHED_BATCH``, sched(7)).

    Holds for the calling thread and those that it starts from here on, processes too; their share
    of the cores stays the same. Where workers compute on all cores, a thread that wakes up has
    cost the one that all wait for a time slice, about 3 ms, in a good part of all steps: gloo's
    loop, which polls for a lock that the thread it has displaced holds; a driver that goes on
    computing before its message is sent; the next tasks, made at the end of a step. A process that
    somebody has given a policy of its own is left alone.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    # A sandbox may forbid it.
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
