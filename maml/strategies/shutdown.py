"""The end of a run over RPC that may have lost some: all wait for all, but for nobody gone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

import torch.distributed.rpc as rpc
from torch.futures import Future

from maml.processes.goodbye import GOODBYE
from maml.processes.liveness import BEAT, Liveness
from maml.processes.rpc_world import leave_rpc

SILENT = 3.0
"""Seconds without a heartbeat after which a process is not waited for, once all is done."""


class Shutdown:
    """On rank 0: where the others run, who has left, and whether all have."""

    def __init__(self, liveness: Liveness) -> None:
        global _shutdown
        self._liveness = liveness
        self._changed = threading.Condition()
        self._leaving: dict[int, Future[bool]] = {}
        _shutdown = self

    def leave(self, rank: int) -> Future[bool]:
        """Return the future of whether all leave."""
        future: Future[bool] = Future()
        with self._changed:
            self._leaving[rank] = future
            self._changed.notify_all()
        return future

    def take(self, others: Iterable[int], failed: set[int], patience: float) -> None:
        """Wait for those who live: they may be in the middle of a gradient. Then let all go.

        Args:
            others: The ranks that were told that all is done.
            failed: Those of them that are known to be gone.
            patience: Seconds for one that is slow but answers.
        """
        clock = self._liveness.clock
        deadline = clock.now() + patience
        missing = self._missing(set(others) - failed, GOODBYE)
        while missing and clock.now() < deadline:
            slow = missing - self._liveness.silent(SILENT)
            if not slow:
                break
            left = min(GOODBYE, deadline - clock.now())
            missing = missing - slow | self._missing(slow, max(left, 0))
        for rank in sorted(missing):
            self._leave_behind(rank)
        for rank in failed:
            # One that was given up may be stopped, and would wait for ever.
            if self._liveness.members[rank].is_near:
                self._liveness.members[rank].kill()
        all_leave = not missing and not failed
        with self._changed:
            leaving = list(self._leaving.values())
        for future in leaving:
            future.set_result(all_leave)
        if not all_leave:
            # Not gracefully: that would wait for those who are gone.
            leave_rpc()

    def _missing(self, expected: set[int], seconds: float) -> set[int]:
        """Wait for ``expected`` to leave, not longer than ``seconds``; return who has not."""
        clock = self._liveness.clock
        until = clock.now() + seconds
        with self._changed:
            # In pieces, as the clock may stand still meanwhile.
            while not expected <= self._leaving.keys() and clock.now() < until:
                self._changed.wait(BEAT)
            return expected - self._leaving.keys()

    def _leave_behind(self, rank: int) -> None:
        """End a process that does not answer, if it is one of this host's: it may be frozen."""
        member = self._liveness.members[rank]
        line = f"{member} did not leave in time"
        if member.is_near:
            line += "; killed" if member.kill() else "; it is gone"
        print(f"{line}; all work is done", file=sys.stderr, flush=True)


_shutdown: Shutdown | None = None


@rpc.functions.async_execution
def _leave(rank: int) -> Future[bool]:
    """Run on rank 0: another one leaves."""
    assert _shutdown is not None
    return _shutdown.leave(rank)


def leave(rank: int) -> None:
    """On another rank, ``rank``: leave, when all do; without them if some were lost.

    There is no time limit: rank 0, which is watched over, may still wait for one that is slow.
    """
    try:
        all_leave = rpc.rpc_sync(0, _leave, (rank,), timeout=0)
    except RuntimeError:
        all_leave = False
    if not all_leave:
        leave_rpc()
