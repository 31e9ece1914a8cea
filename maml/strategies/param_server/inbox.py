"""The server's inbox: pushes arrive in RPC threads, one thread takes them out and answers.

Batched updates with asynchronous execution (PyTorch's tutorial of that name): a push frees its
thread at once, whoever comes last; its answer is a future that is resolved later. Nothing is
accumulated or stepped in RPC threads, so there is nothing that could be left outside a lock.
"""

import queue
import threading
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor
from torch.futures import Future


class Order(NamedTuple):
    """From the server: the tasks that a trainer computes next.

    Attributes:
        step: The step whose model it carries.
        ids: ``[T]`` int64 task ids.
        params: ``[P]`` the model, flat; empty where it stays on the server.
    """

    step: int
    ids: Tensor
    params: Tensor


class Result(NamedTuple):
    """From a trainer: what came of an order.

    Attributes:
        step: The order's step.
        flat: ``[P + 1 + M + 1]``, a packed share.
        wire_bytes: Bytes of tensors that were sent for it.
    """

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
            if not self._closed:
                self._events.put(Event(rank, result, answer))
                return answer
        answer.set_result(None)
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
