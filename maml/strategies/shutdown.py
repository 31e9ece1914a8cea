"""The end of a run over RPC: all wait for all, but for nobody gone."""

import contextlib
import math
import sys
import threading
from collections.abc import Iterable

import torch.distributed.rpc as rpc
from torch.futures import Future

from maml.processes.board import BEAT
from maml.processes.liveness import GOODBYE, Liveness

SILENT = 3.0
"""Seconds without a heartbeat after which a process is not waited for, once all is done."""


class Shutdown:
    """On rank 0: who of the others is about to leave, and waits for all."""

    def __init__(self, liveness: Liveness) -> None:
        global _shutdown
        self._liveness = liveness
        self._changed = threading.Condition()
        self._leaving: dict[int, Future[None]] = {}
        _shutdown = self

    def leave(self, rank: int) -> Future[None]:
        """Return the future of when all leave."""
        future: Future[None] = Future()
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
        began = clock.now()
        with self._changed:
            while missing := set(others) - failed - self._leaving.keys():
                waited = clock.now() - began
                silent = self._liveness.silent(SILENT if waited > GOODBYE else math.inf)
                if missing <= silent or waited > patience:
                    break
                # In pieces, as the clock may stand still meanwhile.
                self._changed.wait(BEAT)
            leaving = list(self._leaving.values())
        for rank in sorted(missing - self._liveness.excused):
            self._leave_behind(rank)
        for rank in failed:
            # One that was given up may be stopped, and would wait for ever.
            if self._liveness.members[rank].is_near:
                self._liveness.members[rank].kill()
        for future in leaving:
            future.set_result(None)

    def _leave_behind(self, rank: int) -> None:
        """End a process that does not answer, if it is one of this host's: it may be frozen."""
        member = self._liveness.members[rank]
        line = f"{self._liveness.name([rank])} did not leave in time"
        if member.is_near:
            line += "; killed" if member.kill() else "; it is gone"
        print(f"{line}; all work is done", file=sys.stderr, flush=True)


_shutdown: Shutdown | None = None


@rpc.functions.async_execution
def _leave(rank: int) -> Future[None]:
    """Run on rank 0: another one leaves."""
    assert _shutdown is not None
    return _shutdown.leave(rank)


def leave(rank: int) -> None:
    """On another rank, ``rank``: wait until all leave.

    There is no time limit: rank 0, which is watched over, may still wait for one that is slow. It
    may be gone before its answer is here.
    """
    with contextlib.suppress(RuntimeError):
        rpc.rpc_sync(0, _leave, (rank,), timeout=0)
