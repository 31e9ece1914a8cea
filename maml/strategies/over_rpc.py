"""What the strategies over RPC share: rank 0 drives, the others serve it until all is done."""

from __future__ import annotations

import atexit
import functools
import math
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
import torch.distributed.rpc as rpc
import torchopt.distributed as todist
from torch.distributed.rpc.internal import PythonUDF, RemoteException, _run_function

from maml.config import Config
from maml.errors import UserError, WorkerLostError
from maml.processes.clock import within
from maml.processes.liveness import GOODBYE
from maml.processes.setup import init_process
from maml.processes.store import START_TIMEOUT
from maml.processes.world import World, choose_interface
from maml.strategies.base import Strategy
from maml.worker import Worker

SILENT = 3.0
"""Seconds without a heartbeat after which a process is not waited for, `GOODBYE` after the end."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="OverRpc")
Answer: TypeAlias = torch.futures.Future[Any]
"""What a call is answered with later: until then it holds no thread."""

_this: OverRpc | None = None


def this(kind: type[S]) -> S:
    """Return this process's strategy: a call that comes in names a function, and no object."""
    assert isinstance(_this, kind)
    return _this


class OverRpc(Strategy):
    """A strategy of one driving process, rank 0, and others that serve it.

    Attributes:
        others: The ranks that serve.
        spared: How many of them the run can do without.
        gone: On rank 0, those of them that were lost.
        finished: Set when rank 0 has said that all is done.
    """

    def __init__(self, config: Config, world: World, worker: Worker) -> None:
        super().__init__(config, world, worker)
        self.drives, self.home = world.rank == 0, torch.device("cpu")
        self.others = range(1, world.size)
        self.spared = 0
        self.gone: set[int] = set()
        self.finished = threading.Event()
        self.liveness.survives = self.survives

    @contextmanager
    def transport(self) -> Iterator[None]:
        """Join TorchOpt's RPC world.

        The end waits for nobody: RPC's own graceful shutdown needs the launcher's store, and a
        frozen peer would hold it for ever. Rank 0 waits before, in `finish`.
        """
        choose_interface(self.world)
        options = rpc.TensorPipeRpcBackendOptions(
            init_method="maml://",
            num_worker_threads=max(self.config.rpc_threads, self.world.size),
            rpc_timeout=max(START_TIMEOUT, self.config.timeout),
            # Not shared memory: its threads never sleep, and take what the tasks need of each core.
            _transports=["ibv", "uv"],
            _channels=["basic"],
        )

        @todist.auto_init_rpc(self._init_worker, rpc_backend_options=options)
        def enter() -> None:
            """Be initialised; the decorator does the work."""

        # Emitted inside torch's own RPC initialisation, about torch's own call.
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        try:
            enter()
        finally:
            # It registers a graceful shutdown without a timeout at exit.
            atexit.unregister(rpc.shutdown)
        # From here on `maml.processes.liveness` finds who is silent; before, one may just be slow
        # to import. 0: no limit.
        rpc._set_rpc_timeout(0)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            within(5.0, lambda: rpc.shutdown(graceful=False), None)

    def _init_worker(self) -> None:
        global _this
        init_process(self.config, self.world)
        _this = self

    def serve(self) -> None:
        """Wait while calls are answered, in the transport's threads, until all is done."""
        self.stop.install()
        self.wait_for(self.finished)

    def wait_for(self, event: threading.Event) -> None:
        """Wait for ``event``, for as long as rank 0 lives, whatever signal this process gets."""
        with self.liveness.waits.serving():
            event.wait()

    def finish(self) -> None:
        """On rank 0: send the others home, and wait for those who live."""
        if not self.drives:
            return
        self.send_home()
        liveness, clock = self.liveness, self.liveness.clock
        patience = GOODBYE if self.stop else self.config.timeout
        began = clock.now()
        # One may be in the middle of a gradient.
        while missing := liveness.staying() - self.gone:
            waited = clock.now() - began
            silent = liveness.silent(SILENT if waited > GOODBYE else math.inf)
            if missing <= silent or waited > patience:
                break
            time.sleep(0.05)
        for rank in sorted(missing - liveness.excused):
            line = f"{liveness.name([rank])} did not leave in time"
            if liveness.members[rank].is_near:
                line += "; killed" if liveness.members[rank].kill() else "; it is gone"
            print(f"{line}; all work is done", file=sys.stderr, flush=True)
        for rank in self.gone:
            # One that was given up may be stopped, and would wait for ever.
            if liveness.members[rank].is_near:
                liveness.members[rank].kill()

    def send_home(self) -> None:
        """Tell the others that all is done."""
        for rank in set(self.others) - self.gone:
            with suppress(RuntimeError):
                rpc.rpc_async(rank, _finish)

    def survives(self, rank: int, line: str) -> bool:
        """Give up a lost rank, in a thread; say whether the run goes on: see `Liveness`."""
        self.gone.add(rank)
        if len(self.gone) > self.spared:
            return False
        print(f"{line}; training goes on without it", file=sys.stderr, flush=True)
        return True


def _finish() -> None:
    assert _this is not None
    _this.finished.set()


def reported(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that others call over RPC tell its failure itself, with its rank and host.

    Over RPC, an exception's text is cut into lines, or cannot be read at all.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        assert _this is not None
        liveness = _this.liveness
        try:
            with liveness.waits.called():
                return function(*args, **kwargs)
        except Exception as error:
            liveness.report(error)
            if not isinstance(error, (UserError, WorkerLostError)):
                traceback.print_exc()
            # As RPC returns an exception, which it would print with a traceback of this file.
            return cast("T", RemoteException("it has told why", RuntimeError))

    return call


def answer_all(answers: Sequence[Answer], compute: Callable[[], Sequence[Any]]) -> None:
    """Give each of the answers to come its own of what ``compute`` returns, or its failure."""
    # As RPC runs a function: it turns an exception into what the caller will raise.
    found = _run_function(PythonUDF(compute, (), {}))
    if isinstance(found, RemoteException):
        found = [found] * len(answers)
    for answer, content in zip(answers, found, strict=True):
        answer.set_result(content)


class Gathering:
    """Gathers the calls of each round; the one that comes last computes the answers to all.

    What is computed does not depend on the order in which calls come: they go by their places.
    """

    def __init__(self, compute: Callable[[list[int], Any], Sequence[Any]]) -> None:
        """Gather for ``compute``, from places and what all share to an answer for each."""
        self._compute = compute
        self._lock = threading.Lock()
        # Of each round, what all share and how many calls there are; the calls, by their places.
        self._begun: dict[int, tuple[Any, int]] = {}
        self._calls: dict[int, dict[int, Answer]] = {}

    def begin(self, number: int, shared: Any, expected: int) -> None:
        """Take what the calls of round ``number`` share, and how many there are, at least 1."""
        with self._lock:
            self._begun[number] = shared, expected
        self._compute_if_complete(number)

    def call(self, number: int, place: int) -> Answer:
        """Take a call of round ``number``, with a place of its own; return its answer to come."""
        answer: Answer = torch.futures.Future()
        with self._lock:
            self._calls.setdefault(number, {})[place] = answer
        self._compute_if_complete(number)
        return answer

    def _compute_if_complete(self, number: int) -> None:
        with self._lock:
            shared, expected = self._begun.get(number, (None, None))
            if expected != len(self._calls.get(number, ())):
                return
            del self._begun[number]
            calls = self._calls.pop(number)
        places = sorted(calls)
        answer_all([calls[place] for place in places], lambda: self._compute(places, shared))
