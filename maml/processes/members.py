"""The processes of a run, and what this one sees of those on its own host."""

from collections.abc import Collection, Iterable

from maml.processes.clock import Clock
from maml.processes.identity import Identity, OutOfMemory

AT_ONCE = 2.0
"""Processes that end within this many seconds were lost at once: by the same cause."""


class Members:
    """All ranks by name. It sees whether a rank of this host has ended, is stopped, or runs.

    Attributes:
        found: The identity of each rank; empty until all have met.
        ended: When a rank of this host was first seen to have ended, by the run's clock.
    """

    def __init__(self, rank: int, clock: Clock) -> None:
        """``rank``: of this process."""
        self._rank, self._clock = rank, clock
        self.found: dict[int, Identity] = {}
        self.ended: dict[int, float] = {}
        self._memory, self._resident = OutOfMemory(), dict[int, int]()

    def watch(self, found: dict[int, Identity]) -> None:
        """Take the identities of all ranks; from now on they can be seen."""
        self.found = found
        for member in found.values():
            member.keep_in_sight()

    def name(self, ranks: Iterable[int]) -> str:
        """Return the names of these ranks' processes, for a message."""
        return ", ".join(
            f"rank {rank} (host {self.found[rank].host}, pid {self.found[rank].pid})"
            if rank in self.found
            else f"rank {rank}"
            for rank in sorted(ranks)
        )

    def near(self) -> set[int]:
        """Return the other ranks of this host."""
        return {r for r, member in self.found.items() if member.is_near and r != self._rank}

    def look(self) -> None:
        """Note which ranks of this host have ended, and how much memory the others have.

        Every process looks at all of them: if rank 0 is lost, too, nobody else has watched them.
        """
        for rank in self.near():
            if not self.has_ended(rank):
                had = self.found[rank].resident()
                self._resident[rank] = had or self._resident.get(rank, 0)

    def has_ended(self, rank: int) -> bool:
        """Return whether a process of this host has ended; False for one of another host."""
        if rank not in self.ended and self.found[rank].is_gone():
            self.ended[rank] = self._clock.now()
        return rank in self.ended

    def stopped(self) -> set[int]:
        """Return the other ranks of this host that a signal has stopped."""
        return {rank for rank in self.near() if self.found[rank].state() == "T"}

    def states(self, ranks: Iterable[int]) -> str:
        """Return a text on what lost ranks do, as far as seen from here."""
        return ", ".join(f"{self.name([rank])} {self._state(rank)}" for rank in sorted(ranks))

    def _state(self, rank: int) -> str:
        if rank in self.ended:
            return "was killed"
        does = {"T": "is stopped by a signal", "?": "does not answer"}
        return does.get(self.found[rank].state(), "hangs")

    def others(self, lost: Collection[int], moment: float, *, leaving: bool) -> str:
        """Return a text on who else of this host is stopped, or has ended at ``moment``; or "".

        Whoever ends later does so because of the ``lost`` ranks. Once all are ``leaving``, a rank
        that has ended was not lost. The text begins with a comma, to follow that on the lost.
        """
        found = self.stopped()
        if not leaving:
            ended = self.near() & self.ended.keys()
            found |= {rank for rank in ended if abs(self.ended[rank] - moment) < AT_ONCE}
        return "".join(f", {self.states([rank])}" for rank in sorted(found - {*lost}))

    def cause(self, killed: Collection[int]) -> str:
        """Return what to append to the line about killed ranks; "" if memory did not run out."""
        had = self._resident.get(*killed) if len(killed) == 1 else None
        return self._memory.cause("it", had)

    def kill(self, rank: int) -> bool:
        """Kill a rank if it is on this host and still there; return whether it was."""
        return self.found[rank].kill()

    def kill_lost(self, lost: Collection[int]) -> None:
        """Kill stopped and ``lost`` ranks of this host: a launcher would wait half a minute."""
        near = self.near()
        killed = self.stopped() | (near & {*lost})
        # Only one process per host kills: another may still be reading how the rank was lost.
        if all(self.has_ended(rank) for rank in near - killed if rank < self._rank):
            for rank in killed:
                self.kill(rank)
