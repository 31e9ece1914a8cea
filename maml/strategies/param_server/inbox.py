"""The server's inbox: pushes arrive in RPC threads, one thread takes them out and answers.

As in PyTorch's tutorial on asynchronous execution: a push frees its thread at once; its answer is a
future that is resolved later. Nothing is summed or stepped in RPC threads.
"""

import queue
import threading
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor
from torch.futures import Future


class Order(NamedTuple):
    """From the server: the tasks ``ids [T]`` that a trainer computes next, for a step.

    ``params [P]`` is the step's model, flat; empty where it stays on the server.
    """

    step: int
    ids: Tensor
    params: Tensor


class Result(NamedTuple):
    """What came of an order: its step, a packed share, and the bytes that were sent for it."""

    step: int
    flat: Tensor
    wire_bytes: int


class Event(NamedTuple):
    """Something that arrived from ``rank``; ``answer``: the order that it now waits for, if any.

    An order that is None sends the trainer home.
    """

    rank: int
    result: Result | None
    answer: Future[Order | None] | None


class Inbox:
    """Events from trainers in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closed = False

    def exchange(self, rank: int, result: Result | None) -> Future[Order | None]:
        """Push ``result``, if any, and return the future of the next order."""
        answer: Future[Order | None] = Future()
        with self._lock:
            if self._closed:
                answer.set_result(None)
            else:
                self._events.put(Event(rank, result, answer))
        return answer

    def deliver(self, rank: int, result: Result) -> None:
        """Push ``result`` without waiting for an order."""
        self._events.put(Event(rank, result, None))

    def take(self, timeout: float) -> Event | None:
        """Return the oldest event; None if there is none within ``timeout`` seconds."""
        with suppress(queue.Empty):
            return self._events.get(timeout=max(timeout, 0))
        return None

    def close(self) -> None:
        """Send home whoever has asked, and whoever asks from now on."""
        with self._lock:
            self._closed = True
        while event := self.take(0):
            if event.answer is not None:
                event.answer.set_result(None)
