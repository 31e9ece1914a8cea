"""Who takes part in a run, and who lives: the one place that knows, for every strategy.

Each process writes a number into the launcher's store every second, its heartbeat. Rank 0 reads
those of all, the others read rank 0's: rank 0 judges all, and all judge rank 0. What is seen stands
in docs/strategies.md ("When a process is lost"). A silence of `EVIDENCE` seconds is enough where a
connection broke as well, or a wait was too long. A heartbeat says whether its process waits for
others: whoever does not is the one that they wait for. One that fails says so in place of a number.

Time is that of `maml.processes.clock`: a job that was suspended as a whole goes on.

Then all end: one process says in one line who was lost, and how. But once all is done, which rank 0
says, rank 0 ends as if nobody was lost. A thread does all this, as the main thread may wait in a
transport's call, where Python runs nothing else.
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
"""Seconds in which rank 0 says why all end. Then another process does."""

LAST_WORDS = 20.0
"""Seconds that a process takes at most to save what it has, before it ends."""

GOODBYE = 10.0
"""Seconds that rank 0 waits for the others at most, once all is done."""

_FAILED, _WAITS = b"!", b" waits"
"""In place of a number: it has failed, and what follows is the line. After a number: it waits for
others, or for something to do."""


class Liveness:
    """Watches over the processes of a run, from `watch` to `leave`. One process watches nobody.

    Attributes:
        survives: Called on rank 0, in a thread, with a rank that was lost and the line for it;
            where it returns True, the others go on.
        last_words: Called in a thread before this process ends, with the line: to save what it has.
        clock: By which a wait for others is too long; it runs from `watch` to `leave`.
        excused: On rank 0, the ranks without which the others go on.
    """

    def __init__(self, world: World, timeout: float, stop: StopRequest) -> None:
        """Give a process up after ``timeout`` seconds of silence; rank 0 hears all's ``stop``."""
        self.world, self.timeout = world, timeout
        self._limit = f"--timeout {timeout:g}"
        self.survives: Callable[[int, str], bool] = lambda rank, line: False
        self.last_words: Callable[[str], None] = lambda line: None
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
        # Its own failure; why it suspects another; who has ended, and since when; whether a loss
        # after the end was said.
        self._failure: Finding | None = None
        self._suspected, self._said = "", False
        self._ended: dict[int, float] = {}
        self._memory, self._resident = OutOfMemory(), dict[int, int]()

    def watch(self) -> None:
        """Meet all others, and watch over them; RuntimeError if one does not come."""
        if self.world.size > 1:
            self.members = self._board.meet(range(1, self.world.size) if self._is_zero else [0])
            say_all_have_met()
            self._judge_thread = threading.Thread(target=self._judge, name="liveness", daemon=True)
            self._judge_thread.start()
        when_lost(lambda line: self._meet_end(Finding(line)))

    def finish(self) -> None:
        """On rank 0: all is done, and written. A later loss takes nothing back."""
        self._board.say_done()

    @property
    def _me(self) -> str:
        return self.name([self.world.rank])

    @property
    def finished(self) -> bool:
        """Whether rank 0 has said that all is done, as far as this process knows."""
        return bool(self._board.done)

    def leave(self) -> None:
        """Watch no more, and be missed by nobody: all is done. Rank 0 is last.

        Where no launcher holds the store, rank 0 does, and it goes with its process. One that does
        not leave is not waited for long, and that is no error.
        """
        if self._is_zero and not self._over.is_set():
            deadline = time.monotonic() + min(self.timeout, GOODBYE)
            while self._judged() and time.monotonic() < deadline:
                time.sleep(0.05)
        self._over.set()
        self._board.leave()
        when_lost(lambda line: None)
        for thread in filter(None, (self._board.thread, self._judge_thread)):
            # One that is in a question to the store must not meet the interpreter's end; but a
            # frozen store does not answer.
            thread.join(2.0)

    def name(self, ranks: Iterable[int]) -> str:
        """Return how to call the processes of these ranks."""
        return ", ".join(
            f"rank {rank} (host {self.members[rank].host}, pid {self.members[rank].pid})"
            if rank in self.members
            else f"rank {rank}"
            for rank in sorted(ranks)
        )

    def staying(self) -> set[int]:
        """Return the ranks that have not left, of those it watches."""
        return {rank for rank in self._board.heard if self._board.beats.get(rank) != LEFT}

    def silent(self, seconds: float) -> set[int]:
        """Return the `staying` that were lost, or silent for so long."""
        board = self._board
        found = {r for r in board.heard if board.silence(r) > seconds or self._is_lost(r)}
        return found & self.staying()

    def check(self) -> None:
        """End this process if another one of this host was killed.

        Torchrun ends all when one is lost, by the signal that a scheduler stops a run with: this
        tells which of the two it was.
        """
        if any(self._has_ended(rank) for rank in self._judged()):
            # One that leaves in good order has said so, and the thread may not have read it.
            time.sleep(4 * BEAT)

    def explain(self, error: BaseException) -> WorkerLostError:
        """Return what to raise for a transport's ``error``, where the thread finds no reason.

        It is seen here before it is known who was lost; the thread will end this process meanwhile.
        """
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        late = isinstance(error, TimeoutError) or timed_out(error)
        if self._judge_thread:
            self._suspected = self._limit if late else "a connection broke"
            until = time.monotonic() + self._grace()
            while time.monotonic() < until:
                if self.finished and (self._is_zero or self._board.beats.get(0) == LEFT):
                    break  # all is done, and rank 0 lives: it is all the same why
                time.sleep(0.1)
        if late:
            alive = f", {self._busy()}" if self._judge_thread else ""
            more = "" if line in alive else f": {line}"
            return WorkerLostError(f"no answer within {self._limit} s{alive}{more}")
        return WorkerLostError(f"a worker was lost: {line}")

    def report(self, error: BaseException) -> None:
        """Tell the others that this process has failed by ``error``: they end, for this reason."""
        self._fail_by(self._line_of(error), exit_code(error))

    def fail(self, error: BaseException) -> str:
        """End the others, as this process fails by ``error``; return the line that it is to say."""
        if not self._judge_thread or self._over.is_set():
            return self._line_of(error)
        self.report(error)
        assert self._failure is not None
        line = self._failure.line
        with self._ending:
            if self._is_zero:
                # No rank was lost, that others might have to end: this one ends by itself.
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
        """End, unless this process goes on without what was lost; then let all know that."""
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
        """Return what ends this process, if anything."""
        if self._board.told:
            return Finding.read(self._board.told)
        for rank in self._judged():
            beat = self._board.beats.get(rank, b"")
            if beat.startswith(_FAILED):
                return Finding.read(beat[1:])
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
            # Later than rank 0, which finds it silent if it is this process that was cut off.
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
        """Say who keeps others waiting, although all live, as far as it can be seen from here."""
        busy = [r for r in self._judged() if not self._board.beats.get(r, _WAITS).endswith(_WAITS)]
        who = f"{self.name(busy) or 'one'} {'hang' if len(busy) > 1 else 'hangs'}"
        return f"although all processes are alive: {who}, or needs more time than that"

    def _grace(self) -> float:
        """Return the seconds in which it is found who was lost, if one was; rank 0 is first."""
        return EVIDENCE + (2 if self._is_zero else 5) * BEAT

    def _state(self, rank: int) -> str:
        """Say what a silent process does, as far as it can be seen from here."""
        member, name = self.members[rank], self.name([rank])
        if not member.is_near:
            return f"{name} does not answer"
        return f"{name} is stopped by a signal" if member.is_stopped() else f"{name} hangs"

    def _judged(self) -> list[int]:
        """Return who is still to be there."""
        return sorted(self.staying() - self.excused)

    def _has_ended(self, rank: int) -> bool:
        """Say whether a process of this host has ended; of other hosts nothing is known."""
        member = self.members[rank]
        if rank not in self._ended:
            if member.is_gone():
                self._ended[rank] = self.clock.now()
            elif member.is_near:
                self._resident[rank] = member.resident() or self._resident.get(rank, 0)
        return rank in self._ended

    def _is_lost(self, rank: int) -> bool:
        """Say whether it has ended, and its last heartbeat, that it has left, would be known."""
        if not self._has_ended(rank):
            return False
        since = self._ended[rank]
        return self._board.answered > since + BEAT / 4 or self.clock.now() > since + 3 * BEAT

    def _holder(self, *, is_seen: bool = True) -> str:
        """Name whoever holds the store, and what it does, if that can be seen."""
        if launcher_holds_store():
            return "the launcher (torchrun or launch/local, of the first host) is gone or stopped:"
        return f"{self._state(0) if is_seen else self.name([0])}:"

    def _end(self, found: Finding) -> None:
        """Say what was found, unless another one does, save what is to be saved, and end."""
        with self._ending:
            if self._over.is_set():
                return
            line, lost, code = self._board.tell(found)
            lost_zero = lost == 0 or bool(self._board.broken)
            wait = 0.0 if self._is_zero else (0.2 * self.world.rank if lost_zero else SPEAK)
            if self._board.may_speak(wait):
                # A bar may be drawn at this moment.
                tqdm.write(f"error: {line}", file=sys.stderr)
            self._kill_stopped(lost)
            within(LAST_WORDS, lambda: self.last_words(line), None)
            if self._is_zero:
                self._wait_for_all()
            os._exit(code)

    def _kill_stopped(self, lost: int | None) -> None:
        """Kill who is stopped, on this host: a launcher would wait for half a minute."""
        near = {rank: member for rank, member in self.members.items() if member.is_near}
        failed = {rank for rank, beat in self._board.beats.items() if beat.startswith(_FAILED)}
        others = near.keys() - {self.world.rank}
        stopped = {rank for rank in others if near[rank].is_stopped()}
        if lost is not None and lost in near and lost not in failed:  # that ends by itself
            stopped.add(lost)
        # One process of a host does it: another one might still look at how it was lost.
        if self.world.rank == min(near.keys() - stopped, default=None):
            for rank in stopped:
                near[rank].kill()

    def _wait_for_all(self) -> None:
        """On rank 0, with whom the store may go: wait until the others have read why."""
        deadline = time.monotonic() + SPEAK
        while time.monotonic() < deadline and not all(map(self._has_ended, self._judged())):
            time.sleep(0.1)

    def _line_of(self, error: BaseException) -> str:
        text = " ".join(str(error).split())
        if isinstance(error, DivergedError):
            return text  # whoever is heard first: it is no finding of this process alone
        if isinstance(error, WorkerLostError):
            return text if self._is_zero else f"{self._me}: {text}"
        if isinstance(error, KeyboardInterrupt):
            return f"{self._me} was interrupted"
        return f"{self._me} failed: {type(error).__name__}: {text}"


def exit_code(error: BaseException) -> int:
    """Return the exit code of all processes of a run where one fails by ``error``."""
    if isinstance(error, WorkerLostError):
        return error.code
    return 2 if isinstance(error, UserError) else 1
