"""Watch which processes of a run are alive: the one place for this, for every strategy.

Rank 0 reads and judges the heartbeats (`maml.processes.board`) of all processes, the others only
rank 0's. docs/strategies.md ("When a process is lost") lists what they detect. `EVIDENCE` seconds
of silence are enough if a connection also broke, or if a wait was too long.

Time is that of `maml.processes.clock`, so a job that was suspended as a whole goes on.

After a loss all processes end, and one prints a line: which process was lost, and how. A thread
does all this, because the main thread may wait in a transport's call.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

from tqdm import tqdm

from maml.errors import DivergedError, UserError, WorkerLostError, timed_out
from maml.processes.board import BEAT, EVIDENCE, LEFT, Board, Finding
from maml.processes.clock import Clock, Waits, within
from maml.processes.identity import Identity, OutOfMemory
from maml.processes.launcher import launcher_holds_store, say_all_have_met, when_lost
from maml.processes.signals import StopRequest
from maml.processes.world import World

SPEAK = 4.0
"""Seconds in which rank 0 prints why all end. After that, another process prints it."""

LAST_WORDS = 20.0
"""Before a process ends, it may take at most this many seconds to save its work."""

GOODBYE = 10.0
"""Seconds that rank 0 waits for the others at most, once all is done."""

_FAILED, _WAITS = b"!", b" waits"
"""The heartbeat of a failed process begins with `_FAILED`; its `Finding` follows as JSON. The
heartbeat of a process that waits, for others or for work, ends with `_WAITS`."""


class Liveness:
    """Watches the processes of a run, from `watch` to `leave`. A single process watches no other.

    Attributes:
        survives: Called on rank 0, in a thread, with a lost rank and the line about its loss. If it
            returns True, the others go on.
        last_words: Called in a thread, before this process ends, to save its work.
        clock: Measures silences and waits for others; it runs from `watch` to `leave`.
        excused: On rank 0: the lost ranks without which the others go on.
        found: Why the run is over, if a loss does not end this process.
    """

    def __init__(
        self, world: World, timeout: float, stop: StopRequest, *, limit: str = "", ends: bool = True
    ) -> None:
        """Give up a process silent for ``timeout`` s. Any rank's signal sets rank 0's ``stop``.

        ``limit``: the words for the timeout. ``ends``: whether a loss ends this process.
        """
        self.world, self.timeout = world, timeout
        self._limit = limit or f"--timeout {timeout:g}"
        self._ends = ends
        self.found: Finding | None = None
        self.survives: Callable[[int, str], bool] = lambda rank, line: False
        self.last_words: Callable[[], None] = lambda: None
        self.members: dict[int, Identity] = {}
        self.clock = Clock()
        self.excused: set[int] = set()
        self.waits = Waits(self.clock)
        self._is_zero = world.rank == 0
        self._board = Board(
            world, self.clock, stop, self._mine, lambda how: self._fail_by(self._cut_off(how))
        )
        self._over = threading.Event()
        self._ending = threading.RLock()
        self._judge_thread: threading.Thread | None = None
        # This process's failure; why it suspects a loss; whether it has printed a loss after the
        # end; the ranks that have ended, and since when.
        self._failure: Finding | None = None
        self._suspected, self._said = "", False
        self._ended: dict[int, float] = {}
        self._memory, self._resident = OutOfMemory(), dict[int, int]()

    def watch(self) -> None:
        """Meet all other processes and watch them; raise RuntimeError if one is missing."""
        if self.world.size > 1:
            self.members = self._board.meet(range(1, self.world.size) if self._is_zero else [0])
            say_all_have_met()
            self._judge_thread = threading.Thread(target=self._judge, name="liveness", daemon=True)
            self._judge_thread.start()
        when_lost(lambda line: self._meet_end(Finding(line)))

    def finish(self) -> None:
        """On rank 0: announce that all is done and written. A later loss does not fail the run."""
        self._board.say_done()

    @property
    def _me(self) -> str:
        return self.name([self.world.rank])

    @property
    def finished(self) -> bool:
        """Whether rank 0 has announced that all is done, as far as this process has read."""
        return bool(self._board.done)

    def depart(self, how: str, error: BaseException | None) -> None:
        """Leave; others that wait for this process find that it failed by ``error``, or ``how``."""
        if error is not None:
            self.report(error)
        self._fail_by(f"{self._me} {how}", 0)
        self._over.set()
        self.leave(self._mine(0))

    def leave(self, last: bytes = LEFT) -> None:
        """Stop watching, and let no other process miss this one: all is done. Rank 0 leaves last.

        If no launcher holds the store, rank 0 holds it, and the store ends with rank 0. Rank 0
        waits at most `GOODBYE` seconds. A process that has not left by then is no error.
        """
        if self._is_zero and not self._over.is_set():
            deadline = time.monotonic() + min(self.timeout, GOODBYE)
            while self._judged() and time.monotonic() < deadline:
                time.sleep(0.05)
        self._over.set()
        self._board.leave(last)
        when_lost(lambda line: None)
        for thread in filter(None, (self._board.thread, self._judge_thread)):
            # No thread should be in a request to the store when the interpreter ends. But do not
            # wait for ever, because a frozen store does not answer.
            thread.join(2.0)

    def name(self, ranks: Iterable[int]) -> str:
        """Return the names of these ranks' processes, for a message."""
        return ", ".join(
            f"rank {rank} (host {self.members[rank].host}, pid {self.members[rank].pid})"
            if rank in self.members
            else f"rank {rank}"
            for rank in sorted(ranks)
        )

    def staying(self) -> set[int]:
        """Return the watched ranks that have not left."""
        return {rank for rank in self._board.heard if self._board.beats.get(rank) != LEFT}

    def silent(self, seconds: float) -> set[int]:
        """Return the `staying` ranks that were lost, or silent for more than ``seconds``."""
        board = self._board
        found = {r for r in board.heard if board.silence(r) > seconds or self._is_lost(r)}
        return found & self.staying()

    def check(self) -> None:
        """Let this process end as lost, not as stopped, if another process of this host was killed.

        When one process is lost, torchrun ends all others with the same signal that a scheduler
        uses to stop a run. This check tells the two cases apart.
        """
        if any(self._has_ended(rank) for rank in self._judged()):
            # Give the thread time to read that the process left, or else to end this process.
            time.sleep(4 * BEAT)

    def explain(self, error: BaseException) -> WorkerLostError:
        """Return what to raise for a transport's ``error``, if the thread finds no cause.

        Wait first: the thread may find a lost process after the error, and then ends this one.
        """
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        late = isinstance(error, TimeoutError) or timed_out(error)
        if self._judge_thread:
            self._suspected = self._limit if late else "a connection broke"
            until = time.monotonic() + self._grace()
            while time.monotonic() < until and not self.found:
                if self.finished and (self._is_zero or self._board.beats.get(0) == LEFT):
                    break  # all is done, and rank 0 was not lost: the cause does not matter
                time.sleep(0.1)
        if self.found:
            return WorkerLostError(self.found.line)
        if late:
            alive = f", {self._busy()}" if self._judge_thread else ""
            more = "" if line in alive else f": {line}"
            return WorkerLostError(f"no answer within {self._limit} s{alive}{more}")
        return WorkerLostError(f"a worker was lost: {line}")

    def report(self, error: BaseException) -> None:
        """Tell the others that this process failed with ``error``; they end for this reason."""
        self._fail_by(self._line_of(error), exit_code(error))

    def fail(self, error: BaseException) -> str:
        """End the others, because of this process's ``error``; return the line to print, or ""."""
        if not self._judge_thread or self._over.is_set():
            return self._line_of(error)
        self.report(error)
        assert self._failure is not None
        line = self._failure.line
        with self._ending:
            if self._is_zero:
                # No rank is given as lost: the others need not kill rank 0, which ends by itself.
                line = self._board.tell(self._failure._replace(rank=None)).line
                speaks = self._board.may_speak()
                self._wait_for_all()
            else:
                speaks = self._board.may_speak(SPEAK)
            self._over.set()
            self._board.leave()
        return line if speaks else ""

    def _mine(self, number: int) -> bytes:
        if self._failure:
            return _FAILED + json.dumps(self._failure).encode()
        return str(number).encode() + (_WAITS if self.waits else b"")

    def _fail_by(self, line: str, code: int = 1) -> None:
        self._failure = self._failure or Finding(line, self.world.rank, code)

    def _cut_off(self, how: str) -> str:
        return f"{self._me} lost its connections: {how}"

    def _judge(self) -> None:
        while not self._over.wait(BEAT / 2):
            found = self._look()
            if found is not None:
                self._meet_end(found)

    def _meet_end(self, found: Finding) -> None:
        """End, unless this process goes on without the lost rank; then write that it does."""
        if self._board.done and self._is_zero:
            if not self._said and self._board.may_speak():
                tqdm.write(f"{found.line}; all work is done", file=sys.stderr)
            self._said = True
            self._kill_stopped(found.rank)
        elif self.world.rank or found.rank is None or not self.survives(found.rank, found.line):
            self._end(found)
            return
        if found.rank is None:
            self._over.wait()
            return
        self.excused.add(found.rank)
        self._board.spare(found.rank)

    def _look(self) -> Finding | None:
        """Return the finding that ends this process, if there is one."""
        if self._board.told:
            return Finding(*json.loads(self._board.told))
        for rank in self._judged():
            beat = self._board.beats.get(rank, b"")
            if beat.startswith(_FAILED):
                return Finding(*json.loads(beat[1:]))
            if self._is_lost(rank):
                why = self._memory.cause("it", self._resident.get(rank))
                return Finding(f"{self.name([rank])} was killed{why}", rank)
        now = self.clock.now()
        if now > self._board.answered + self.timeout:
            silence = now - self._board.answered
            return Finding(f"{self._holder()} silent for {silence:.0f} s ({self._limit})")
        if self._board.broken and not self._failure:
            if self._is_zero and not launcher_holds_store():
                return Finding(self._cut_off(self._board.broken))
            # Wait longer than rank 0, which finds this process silent if only this one was cut off.
            if now > self._board.answered + EVIDENCE + 3 * BEAT:
                holder = self._holder(is_seen=False)
                return Finding(f"{holder} the connection broke: {self._board.broken}")
        overdue = self.waits.longest() - self.timeout
        is_suspected = self._suspected or overdue > 0
        patience = min(EVIDENCE, self.timeout) if is_suspected else self.timeout
        why = self._suspected or self._limit
        for rank in self._judged():
            silence = self._board.silence(rank)
            if silence > patience:
                return Finding(f"{self._state(rank)}: silent for {silence:.0f} s ({why})", rank)
        if overdue > self._grace():
            return Finding(f"{self._me} had no answer within {self._limit} s, {self._busy()}")
        return None

    def _busy(self) -> str:
        """Return a text that names processes that live but keep others waiting, as far as seen."""
        busy = [r for r in self._judged() if not self._board.beats.get(r, _WAITS).endswith(_WAITS)]
        who = f"{self.name(busy) or 'one'} {'hang' if len(busy) > 1 else 'hangs'}"
        return f"although all processes are alive: {who}, or needs more time than that"

    def _grace(self) -> float:
        """Return the seconds to wait until a lost rank is found; rank 0 waits less, to be first."""
        return EVIDENCE + (2 if self._is_zero else 5) * BEAT

    def _state(self, rank: int) -> str:
        """Return a text on what a silent process does, as far as seen from here."""
        member, name = self.members[rank], self.name([rank])
        if not member.is_near:
            return f"{name} does not answer"
        return f"{name} is stopped by a signal" if member.is_stopped() else f"{name} hangs"

    def _judged(self) -> list[int]:
        """Return the watched ranks that must still be there, sorted."""
        return sorted(self.staying() - self.excused)

    def _has_ended(self, rank: int) -> bool:
        """Return whether a process of this host has ended; False for one of another host."""
        member = self.members[rank]
        if rank not in self._ended:
            if member.is_gone():
                self._ended[rank] = self.clock.now()
            elif member.is_near:
                self._resident[rank] = member.resident() or self._resident.get(rank, 0)
        return rank in self._ended

    def _is_lost(self, rank: int) -> bool:
        """Return whether a rank ended so long ago that a last heartbeat, `LEFT`, would be here."""
        if not self._has_ended(rank):
            return False
        since = self._ended[rank]
        return self._board.answered > since + BEAT / 4 or self.clock.now() > since + 3 * BEAT

    def _holder(self, *, is_seen: bool = True) -> str:
        """Return a text that names the store's holder and, if ``is_seen``, tells its state."""
        if launcher_holds_store():
            return "the launcher (torchrun or launch/local, of the first host) is gone or stopped:"
        return f"{self._state(0) if is_seen else self.name([0])}:"

    def _end(self, found: Finding) -> None:
        """Print the finding unless another process does, save this process's work, and exit."""
        with self._ending:
            if self._over.is_set():
                return
            found = self._board.tell(found)
            if not self._ends:
                self.found = found
                self._over.set()
                self._board.leave()
                return
            line, lost, code = found
            lost_zero = lost == 0 or bool(self._board.broken)
            wait = 0.0 if self._is_zero else (0.2 * self.world.rank if lost_zero else SPEAK)
            if self._board.may_speak(wait):
                # `tqdm.write`, because a progress bar may be on the screen.
                tqdm.write(f"error: {line}", file=sys.stderr)
            self._kill_stopped(lost)
            within(LAST_WORDS, self.last_words, None)
            if self._is_zero:
                self._wait_for_all()
            os._exit(code)

    def _kill_stopped(self, lost: int | None) -> None:
        """Kill the stopped and lost processes of this host: a launcher would wait half a minute."""
        near = {rank: member for rank, member in self.members.items() if member.is_near}
        failed = {rank for rank, beat in self._board.beats.items() if beat.startswith(_FAILED)}
        others = near.keys() - {self.world.rank}
        stopped = {rank for rank in others if near[rank].is_stopped()}
        if lost is not None and lost in near and lost not in failed:  # those end by themselves
            stopped.add(lost)
        # Only one process per host kills: another may still be reading how the rank was lost.
        if self.world.rank == min(near.keys() - stopped, default=None):
            for rank in stopped:
                near[rank].kill()

    def _wait_for_all(self) -> None:
        """On rank 0, with which the store may end: wait until the others have read why they end."""
        deadline = time.monotonic() + SPEAK
        while time.monotonic() < deadline and not all(map(self._has_ended, self._judged())):
            time.sleep(0.1)

    def _line_of(self, error: BaseException) -> str:
        text = " ".join(str(error).split())
        if isinstance(error, DivergedError):
            return text  # without a rank, because all processes find this error at once
        if isinstance(error, WorkerLostError):
            return text if self._is_zero else f"{self._me}: {text}"
        if isinstance(error, KeyboardInterrupt):
            return f"{self._me} was interrupted"
        return f"{self._me} failed: {type(error).__name__}: {text}"


def exit_code(error: BaseException) -> int:
    """Return the exit code of all processes of a run in which one fails with ``error``."""
    if isinstance(error, WorkerLostError):
        return error.code
    return 2 if isinstance(error, UserError) else 1
