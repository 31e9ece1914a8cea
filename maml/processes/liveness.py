"""Watch which processes of a run are alive: the one place for this, for every strategy.

Rank 0 reads and judges the heartbeats (`maml.processes.board`) of all processes, the others only
rank 0's. docs/strategies.md ("When a process is lost") lists what they detect. `EVIDENCE` seconds
of silence are enough if a connection also broke, or if a wait was too long.

Time is that of `maml.processes.clock`, so a job that was suspended as a whole goes on. After a loss
all processes end, and one prints a line: which process was lost, and how. A thread does all this,
because the main thread may wait in a transport's call.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tqdm import tqdm

from maml.errors import WorkerLostError, timed_out
from maml.processes.board import BEAT, EVIDENCE, LEAVING, LEFT, WAITS, Board, Finding
from maml.processes.clock import Clock, Waits, within
from maml.processes.launcher import (
    launcher_holds_store,
    say_all_have_met,
    tell_launcher,
    when_lost,
)
from maml.processes.members import AT_ONCE, Members
from maml.processes.signals import StopRequest
from maml.processes.world import World

SPEAK = 4.0
"""Seconds in which rank 0 prints why all end. After that, another process prints it."""

LAST_WORDS = 20.0
"""Before a process ends, it may take at most this many seconds to save its work."""

GOODBYE = 10.0
"""Seconds that rank 0 waits for the others at most, once all is done."""

GRACE = 5.0
"""Seconds in which a collective ends to which a rank that has left has done its part."""


class Liveness:
    """Watches the processes of a run, from `watch` to `leave`. A single process watches no other.

    Attributes:
        survives: On rank 0, called in a thread with lost ranks and their line; True: others go on.
        last_words: Called in a thread, before this process ends, to save its work.
        clock: Measures silences and waits for others; it runs from `watch` to `leave`.
        excused: On rank 0: the lost ranks without which the others go on.
        found: Why the run is over, if a loss does not end this process.
    """

    def __init__(
        self, world: World, timeout: float, stop: StopRequest, *, limit: str = "", ends: bool = True
    ) -> None:
        """Give up a process silent for ``timeout`` s (``limit`` in words). Any rank's signal sets
        rank 0's ``stop``. ``ends``: whether a loss ends this process.
        """
        self.world, self.timeout = world, timeout
        self._limit = limit or f"--timeout {timeout:g}"
        self._ends = ends
        self.found: Finding | None = None
        self.survives: Callable[[Collection[int], str], bool] = lambda ranks, line: False
        self.last_words: Callable[[], None] = lambda: None
        self.clock = Clock()
        self.members = Members(world.rank, self.clock)
        self.excused: set[int] = set()
        self.waits = Waits(self.clock)
        self._is_zero = world.rank == 0
        self._board = Board(world, self.clock, stop, self.members, self.waits)
        self._over = threading.Event()
        self._ending = threading.RLock()
        self._judge_thread: threading.Thread | None = None
        # Why this process suspects a loss; whether it has printed a later loss.
        self._suspected, self._said = "", False

    def watch(self, content: Any = None) -> list[Any]:
        """Meet all other processes and watch them; return every rank's ``content``, as from JSON.

        Raises:
            WorkerLostError: if one does not come.
        """
        contents = [content]
        if self.world.size > 1:
            watched = range(1, self.world.size) if self._is_zero else [0]
            try:
                contents = self._board.meet(watched, content)
            except (RuntimeError, ValueError) as error:
                who = "another process" if self._is_zero else "rank 0"
                where = ":".join(os.environ.get(n, "?") for n in ("MASTER_ADDR", "MASTER_PORT"))
                line = str(error).strip().splitlines()[0]
                raise WorkerLostError(f"{who} did not join the start at {where}: {line}") from error
            say_all_have_met()
            self._judge_thread = threading.Thread(target=self._judge, name="liveness", daemon=True)
            self._judge_thread.start()
        when_lost(lambda line: self._meet_end(Finding(line)))
        return contents

    def finish(self) -> None:
        """On rank 0: announce that all is done and written. A later loss does not fail the run."""
        self._board.say_done()

    @property
    def finished(self) -> bool:
        """Whether rank 0 has announced that all is done, as far as this process has read."""
        return bool(self._board.done)

    def patience(self) -> float:
        """Return for how many more seconds a collective may wait: not for ever once a rank is gone.

        A rank that left may have done its part of a collective, which then ends within `GRACE`.
        """
        if self.found:
            return 0.0 if self.found.code else GRACE
        return 0.0 if self.excused or self._board.done == LEAVING else math.inf

    @contextlib.contextmanager
    def guard(self, *, limited: bool = True) -> Iterator[None]:
        """Turn a failure of a transport into a `WorkerLostError`, after a wait for its cause.

        A ``limited`` body may last no longer than the timeout. This does not rely on the
        transport's own time limits, because they would count a suspension of the job.
        """
        try:
            with self.waits.during("limited" if limited else "serving"):
                yield
        except RuntimeError as error:
            raise self.explain(error) from error

    def depart(self, how: str, error: BaseException | None) -> None:
        """Leave; others that wait for this process find that it failed by ``error``, or ``how``."""
        if error is not None:
            self.report(error)
        self._board.fail(f"{self._board.me} {how}", 0)
        self._over.set()
        self.leave(failed=True)

    def leave(self, *, failed: bool = False) -> None:
        """Stop watching, and let no other process miss this one: all is done. Rank 0 leaves last.

        If no launcher holds the store, rank 0 holds it, and the store ends with rank 0. Rank 0
        waits at most `GOODBYE` seconds. A process that has not left by then is no error.
        """
        if self._is_zero and not self._over.is_set():
            if self.finished:
                self._board.say_done(LEAVING)
            self.await_leaving(min(self.timeout, GOODBYE))
        self._over.set()
        self._board.leave(failed=failed)
        when_lost(lambda line: None)
        for thread in filter(None, (self._board.thread, self._judge_thread)):
            # No thread should be in a request to the store when the interpreter ends. But do not
            # wait for ever, because a frozen store does not answer.
            thread.join(2.0)

    def await_leaving(self, seconds: float) -> list[int]:
        """On rank 0: wait until all others have left or are lost; return who stays.

        Wait at most ``seconds``. After `GOODBYE` of them, `EVIDENCE` seconds of silence are a loss.
        """
        began = self.clock.now()
        while (staying := self._judged()) and (waited := self.clock.now() - began) <= seconds:
            if waited > GOODBYE:
                self._suspected = "rank 0 waits for it to leave"
            time.sleep(0.05)
        return staying

    def check(self) -> None:
        """Let this process end as lost, not as stopped, if another process of this host was killed.

        When one process is lost, torchrun ends all others with the same signal that a scheduler
        uses to stop a run. This check tells the two cases apart.
        """
        if any(map(self.members.has_ended, self._judged())):
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
                if self.finished and (self._is_zero or self._board.done == LEAVING):
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
        found = self._caused_by(error)
        self._board.fail(found.line, found.code)

    def fail(self, error: BaseException) -> str:
        """End the others, because of this process's ``error``; return the line to print, or ""."""
        if not self._judge_thread or self._over.is_set():
            return self._caused_by(error).line
        self.report(error)
        failure = self._board.failure
        assert failure is not None
        line = failure.line
        with self._ending:
            if self._is_zero:
                # No rank is given as lost: the others need not kill rank 0, which ends by itself.
                line = self._board.tell(failure._replace(ranks=())).line
                speaks = self._board.may_speak()
                self._wait_for_others()
            else:
                speaks = self._board.may_speak(SPEAK)
            self._over.set()
            self._board.leave()
        return line if speaks else ""

    def _caused_by(self, error: BaseException) -> Finding:
        return Finding.of_error(error, self._board.me, self.world.rank)

    def _judge(self) -> None:
        try:
            while not self._over.wait(BEAT / 2):
                found = self._look()
                if found is not None:
                    self._meet_end(found)
        except Exception as error:
            # From here on nobody would watch the others.
            traceback.print_exc()
            self._end(self._caused_by(error)._replace(ranks=()))

    def _meet_end(self, found: Finding) -> None:
        """End, unless this process goes on without the lost rank; then write that it does."""
        with self._ending:  # while one thread ends this process, another does not let it go on
            if self._board.done and self._is_zero:
                if not self._said and self._board.may_speak():
                    tqdm.write(f"{found.line}; all work is done", file=sys.stderr)
                self._said = True
                self.members.kill_lost({*found.ranks} - self._board.failures().keys())
            elif self.world.rank or not found.ranks or not self.survives(found.ranks, found.line):
                self._end(found)
                return
            self.excused.update(found.ranks)
            for rank in found.ranks:
                self._board.spare(rank)
        if not found.ranks:
            self._over.wait()

    def _look(self) -> Finding | None:
        """Return the finding that ends this process, if there is one."""
        if self._board.told:
            return Finding(*json.loads(self._board.told))
        if self._board.error:
            raise self._board.error
        failures = self._board.failures()
        for rank in self._judged():
            if rank in failures:
                return failures[rank]
        self.members.look()
        return self._killed() or self._store_lost() or self._silent()

    def _killed(self) -> Finding | None:
        """Return the ranks that were killed at once, as soon as this is certain for all of them."""
        ended = {r: self.members.ended[r] for r in self._judged() if self.members.has_ended(r)}
        first = min(ended.values(), default=0.0)
        killed = [rank for rank, since in ended.items() if since < first + AT_ONCE]
        if not killed or not all(map(self._is_lost, killed)):
            return None
        line = self.members.states(killed) + self._others(killed, first)
        return Finding(line + self.members.cause(killed), killed)

    def _store_lost(self) -> Finding | None:
        """Return that the store is silent, or that the connection to it broke."""
        answered, now = self._board.answered, self.clock.now()
        if now > answered + self.timeout:
            line = self._holder() + self._others([0], answered)
            lost = [] if launcher_holds_store() else [0]
            return Finding(f"{line}: silent for {now - answered:.0f} s ({self._limit})", lost)
        if self._board.broken and not self._board.failure:
            if self._is_zero and not launcher_holds_store():
                return Finding(f"{self._board.me} lost its connections: {self._board.broken}")
            # Wait longer than rank 0, which finds this process silent if only this one was cut off.
            if now > answered + EVIDENCE + 3 * BEAT:
                line = self._holder(is_seen=False) + self._others([0], answered)
                return Finding(f"{line}: the connection broke: {self._board.broken}")
        return None

    def _silent(self) -> Finding | None:
        """Return the ranks that have been silent for too long, or that one keeps others waiting."""
        overdue = self.waits.longest() - self.timeout
        is_suspected = self._suspected or overdue > 0
        patience = min(EVIDENCE, self.timeout) if is_suspected else self.timeout
        why = self._suspected or self._limit
        silences = {rank: self._board.silence(rank) for rank in self._judged()}
        longest = max(silences.values(), default=0.0)
        if longest > patience:
            # Those that have been silent for nearly as long were lost at the same time.
            lost = [rank for rank, silence in silences.items() if silence > 0.8 * patience]
            began = self._board.answered - longest
            line = self.members.states(lost) + self._others(lost, began)
            return Finding(f"{line}: silent for {longest:.0f} s ({why})", lost)
        if overdue > self._grace():
            return Finding(f"{self._board.me} had no answer within {self._limit} s, {self._busy()}")
        return None

    def _busy(self) -> str:
        """Return a text that names processes that live but keep others waiting, as far as seen."""
        busy = [r for r in self._judged() if not self._board.beats.get(r, WAITS).endswith(WAITS)]
        who = f"{self.members.name(busy) or 'one'} {'hang' if len(busy) > 1 else 'hangs'}"
        return f"although all processes are alive: {who}, or needs more time than that"

    def _grace(self) -> float:
        """Return the seconds to wait until a lost rank is found; rank 0 waits less, to be first."""
        return EVIDENCE + (2 if self._is_zero else 5) * BEAT

    def _others(self, lost: Collection[int], moment: float) -> str:
        return self.members.others(lost, moment, leaving=self.finished)

    def _judged(self) -> list[int]:
        """Return the watched ranks that must still be there, sorted."""
        beats = self._board.beats
        staying = {rank for rank in self._board.heard if beats.get(rank) != LEFT}
        return sorted(staying - self.excused)

    def _is_lost(self, rank: int) -> bool:
        """Return whether a rank ended so long ago that a last heartbeat, `LEFT`, would be here."""
        if not self.members.has_ended(rank):
            return False
        since = self.members.ended[rank]
        return self._board.answered > since + BEAT / 4 or self.clock.now() > since + 3 * BEAT

    def _holder(self, *, is_seen: bool = True) -> str:
        """Return a text that names the store's holder and, if ``is_seen``, tells its state."""
        zero, is_near = self.members.name([0]), 0 in self.members.near()
        if not launcher_holds_store():
            return self.members.states([0]) if is_seen or not is_near else zero
        if is_near:
            return "the launcher (torchrun, of this host) is gone or stopped"
        return f"{zero} or its launcher (torchrun) does not answer"

    def _end(self, found: Finding) -> None:
        """Print the finding unless another process does, save this process's work, and exit."""
        with self._ending:
            if self._over.is_set():
                return
            if not self._ends:
                self.found = self._board.tell(found)
                self._over.set()
                self._board.leave()
                return
            code = found.code
            try:
                line, lost, code = self._board.tell(found)
                tell_launcher(f"error: {line}")
                lost_zero = 0 in lost or bool(self._board.broken)
                wait = 0.0 if self._is_zero else (0.2 * self.world.rank if lost_zero else SPEAK)
                speaks = self._board.may_speak(wait)
                if speaks:
                    # `tqdm.write`, because a progress bar may be on the screen.
                    is_done = self.finished and not lost  # rank 0 still draws, without a launcher
                    text = f"{line}; all work is done" if is_done else f"error: {line}"
                    tqdm.write(text, file=sys.stderr)
                self.members.kill_lost({*lost} - self._board.failures().keys())
                within(LAST_WORDS, self.last_words, None)
                if self._is_zero or speaks:
                    self._wait_for_others()
            finally:
                os._exit(code)

    def _wait_for_others(self) -> None:
        """Wait until the others have read why they end, or seen that this process has said it.

        The store may end with rank 0. The right to speak ends with the process that has it.
        """
        deadline = time.monotonic() + SPEAK
        while time.monotonic() < deadline:
            others = self._judged() if self._is_zero else self.members.near()
            if all(map(self.members.has_ended, others)):
                break
            time.sleep(0.1)
