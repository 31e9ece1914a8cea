"""Heartbeats and notices that the processes of a run exchange through the launcher's store.

Each process writes a number, its heartbeat, every second and reads heartbeats of others. A separate
thread does this, because a frozen store never answers a request, even after the time limit.
"""

import contextlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from maml.errors import DivergedError, WorkerLostError, exit_code
from maml.processes.clock import Clock, Waits, within
from maml.processes.identity import Identity
from maml.processes.members import Members
from maml.processes.signals import StopRequest
from maml.processes.speaker import prepare, speaks_for_host
from maml.processes.store import exchange, new_connection, new_room, own_connection, start_name
from maml.processes.world import World

BEAT = 1.0
"""Seconds between two heartbeats."""

LAST_BEAT = 0.1
"""Seconds between two heartbeats once all is done: rank 0 then waits for the others to leave."""

OF_ALL = ("told", "done", "stop")
"""Keys that every process reads together with the heartbeats."""

EVIDENCE = 5.0
"""Seconds of silence that are enough if a connection has also broken."""

LEFT = b"left"
"""Written in place of a number: the process leaves in good order, or has read why all end."""

FAILED, WAITS = b"!", b" waits"
"""A failed process's heartbeat: `FAILED`, its `Finding` as JSON. That of a waiting one ends so."""

DONE, LEAVING = b"done", b"leaving"
"""All is done and written; rank 0 needs the others no more, and waits until they have left."""

T = TypeVar("T")


class Finding(NamedTuple):
    """Why processes must end: the line to print, the lost ranks (if any) and the exit code."""

    line: str
    ranks: Sequence[int] = ()
    code: int = 1

    @classmethod
    def of_error(cls, error: BaseException, name: str, rank: int) -> "Finding":
        """Return that the process of ``rank`` fails with ``error``; ``name`` is its full name."""
        text = " ".join(str(error).split())
        if isinstance(error, KeyboardInterrupt):
            line = f"{name} was interrupted"
        elif not isinstance(error, WorkerLostError):
            line = f"{name} failed: {type(error).__name__}: {text}"
        else:
            # All processes find at once that parameters differ, so its line names no finder.
            line = text if rank == 0 or isinstance(error, DivergedError) else f"{name}: {text}"
        return cls(line, [rank], exit_code(error))


class Board:
    """This process's view of the store, from `meet` to the end of the heartbeat thread.

    Attributes:
        answered: When the store last answered.
        broken: How the connection to the store broke after that answer, or "".
        beats: The latest heartbeat of each watched rank; ``heard``: when each last changed.
        told: The `Finding` that is the reason why all processes end, as JSON, or b"".
        done: `DONE` once rank 0 has announced it, then `LEAVING`; before that, empty.
        failure: What this process says of its own failure, or None.
        error: What has ended the heartbeat thread although it must not end, or None.
    """

    def __init__(
        self, world: World, clock: Clock, stop: StopRequest, members: Members, waits: Waits
    ) -> None:
        """Exchange what ``waits`` tells. A signal that one process gets sets rank 0's ``stop``."""
        self._world, self._clock, self._stop = world, clock, stop
        self._members, self._waits = members, waits
        self.answered, self.broken = 0.0, ""
        self.beats: dict[int, bytes] = {}
        self.heard: dict[int, float] = {}
        self.told, self.done = b"", b""
        self.failure: Finding | None = None
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self._over, self._last = threading.Event(), LEFT
        self._name = uuid.uuid4().hex  # until `meet`, no other process shares it

    @property
    def me(self) -> str:
        """This process's name."""
        return self._members.name([self._world.rank])

    def fail(self, line: str, code: int = 1) -> None:
        """Let the heartbeat say that this process fails, unless it has said so before."""
        self.failure = self.failure or Finding(line, [self._world.rank], code)

    def meet(self, judged: Iterable[int], content: Any) -> list[Any]:
        """Meet all processes, watch ``judged`` from now on, and return every rank's ``content``.

        Raises:
            RuntimeError: if a rank is missing.
        """
        self._room, world, rank = new_room("members"), self._world, self._world.rank
        store = own_connection(world, self._room)
        self._name = f"{start_name(world)} {self._room}"
        prepare()
        if rank == 0:
            for key in ("told", "spoken", "done", "stop"):
                store.set(key, "")
        store.set(f"beat {rank}", "0")
        store.set(f"spared {rank}", "")
        identities, contents = zip(*exchange(store, world, [Identity.own(), content]), strict=True)
        self._members.watch({n: Identity(*of) for n, of in enumerate(identities)})
        self._store = store
        self.answered = self._clock.now()
        self.heard = dict.fromkeys(judged, self.answered)
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()
        return list(contents)

    def leave(self, *, failed: bool = False) -> None:
        """Let the heartbeat thread write that this process has left (or failed), and then end."""
        self._last = self._mine(0) if failed else LEFT
        self._over.set()

    def _mine(self, number: int) -> bytes:
        if self.failure:
            return FAILED + json.dumps(self.failure).encode()
        return str(number).encode() + (WAITS if self._waits else b"")

    def _beat(self) -> None:
        try:
            self._exchange_beats()
        except Exception as error:
            self.error = error

    def _exchange_beats(self) -> None:
        keys = [f"beat {other}" for other in self.heard]
        for number in itertools.count(1):
            over = self._over.wait(LAST_BEAT if self.done else BEAT)
            mine = self._last if over or self.told else self._mine(number)
            try:
                self._store.set(f"beat {self._world.rank}", mine.decode())
                if over:
                    return
                if self._stop.signal is not None:
                    self._store.set("stop", self._stop.signal)
                *beats, self.told, done, stop = self._store.multi_get([*keys, *OF_ALL])
                self.done = done or self.done
                if self._world.rank == 0:
                    self._stop.signal = self._stop.signal or stop.decode() or None
            except RuntimeError as error:
                if over:
                    return
                self._reconnect((str(error) or "closed").splitlines()[0])
                continue
            now = self._clock.now()
            for other, beat in zip(self.heard, beats, strict=True):
                if beat != self.beats.get(other):
                    self.beats[other], self.heard[other] = beat, now
            self.answered, self.broken = now, ""

    def _reconnect(self, how: str) -> None:
        """Try to open a new connection; if this works, report that the old connection broke."""
        with contextlib.suppress(OSError, RuntimeError):
            self._store = new_connection(self._world, self._room, timeout=BEAT)
            self.fail(f"{self.me} lost its connections: {how}")
        self.broken = how

    def silence(self, rank: int) -> float:
        """Return the seconds between a rank's last heartbeat and the store's last answer."""
        return self.answered - self.heard[rank]

    def failures(self) -> dict[int, Finding]:
        """Return what watched ranks have said of their own failure."""
        beats = [(rank, beat) for rank, beat in self.beats.items() if beat.startswith(FAILED)]
        return {rank: Finding(*json.loads(beat[1:])) for rank, beat in beats}

    def say_done(self, what: bytes = DONE) -> None:
        """Write, as rank 0, that all is `DONE`, or that rank 0 is `LEAVING`."""
        if self.done != what:
            self.done = what
            if self.thread is not None:
                within(2.0, lambda: self._store.set("done", what.decode()), None)

    def spare(self, rank: int) -> None:
        """Write that the run goes on without ``rank``: if it still lives, it prints nothing."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"spared {rank}", "yes")

    def tell(self, found: Finding) -> Finding:
        """Tell all processes why they end; return ``found``, or the finding told before it."""
        text = json.dumps(found)
        told = self._ask(lambda: self._store.compare_set("told", "", text), text.encode())
        return Finding(*json.loads(told))

    def may_speak(self, wait: float = 0.0) -> bool:
        """Wait up to ``wait`` seconds for another to speak; return whether this process prints."""
        rank = self._world.rank

        def speaks() -> bool:
            keys = ["spoken", f"spared {rank}"]
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and not any(self._store.multi_get(keys)):
                time.sleep(0.1)
            if self._store.get(keys[1]):
                return False
            told: bytes = self._store.compare_set("spoken", "", str(rank))
            return told == str(rank).encode()

        # Without the store no process knows what the others do, so each host has its own line.
        answer: bool | None = self._ask(speaks, None, wait)
        return answer is not False and speaks_for_host(self._name)

    def _ask(self, ask: Callable[[], T], otherwise: T, wait: float = 0.0) -> T:
        """Return ``ask()``, which takes ``wait`` s, or ``otherwise`` if the store is silent."""
        if self.thread is None or self._clock.now() > self.answered + EVIDENCE:
            return otherwise
        return within(wait + 2.0, ask, otherwise)
