"""The server's inbox: pushes arrive in RPC threads, one thread takes them out and answers.

Batched updates with asynchronous execution (PyTorch's tutorial of that name): a push frees its
thread at once, whoever comes last; its answer is a future that is resolved later. Nothing is
accumulated or stepped in RPC threads, so there is nothing that could be left outside a lock.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from torch.futures import Future

from maml.strategies.param_server.messages import Order, Result


class Event(NamedTuple):
    """Something that arrived from ``rank``. ``waits``: whether it now waits for an order."""

    rank: int
    result: Result | None
    waits: bool


class Inbox:
    """Events from trainers in order of arrival, and the orders that they wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._waiting: dict[int, Future[Order]] = {}
        self._last_order: Order | None = None

    def exchange(self, rank: int, result: Result | None) -> Future[Order]:
        """Push ``result``, if any, and return the future of the next order."""
        future: Future[Order] = Future()
        with self._changed:
            if self._last_order is None:
                self._waiting[rank] = future
                self._events.append(Event(rank, result, waits=True))
                self._changed.notify_all()
                return future
        future.set_result(self._last_order)
        return future

    def deliver(self, rank: int, result: Result) -> None:
        """Push ``result`` without waiting for an order."""
        with self._changed:
            self._events.append(Event(rank, result, waits=False))
            self._changed.notify_all()

    def take(self, timeout: float) -> Event | None:
        """Return the oldest event; None if there is none within ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._events), timeout):
                return None
            return self._events.popleft()

    def give(self, rank: int, order: Order) -> None:
        """Answer ``rank``, which waits."""
        with self._changed:
            future = self._waiting.pop(rank)
        # Outside the lock: it runs the callbacks that send the answer.
        future.set_result(order)

    def give_all(self, last: Order) -> None:
        """Answer everyone who waits, and whoever asks from now on, with ``last``."""
        with self._changed:
            self._last_order = last
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result(last)
