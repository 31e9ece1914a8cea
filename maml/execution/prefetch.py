"""Prefetch of tasks: a thread samples and decodes while other threads compute or wait."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from datasets.tasks import Task

MISSES = 4
"""Stop guessing after this many wrong guesses in a row: the calls follow no pattern."""


class Prefetch:
    """Makes tasks in a thread, one batch ahead; a wrong guess only costs time."""

    def __init__(self, make: Callable[[Tensor], Task]) -> None:
        """``make`` makes the tasks of one batch, given their ids ``[B]``."""
        self._make = make
        self._lock = threading.Lock()
        self._guess: tuple[Tensor, Future[Task]] | None = None
        self._misses = 0

    def tasks(self, batches: Sequence[Tensor]) -> Iterator[Task]:
        """Yield each batch's tasks, by ids ``[B]``; the next are made while the caller computes."""
        if not batches:
            return
        next_one = self._take(batches[0])
        for following in batches[1:]:
            this, next_one = next_one.result(), _thread().submit(self._make, following)
            yield this
        yield next_one.result()

    def guess(self, ids: Tensor, delay: float = 0.0) -> None:
        """Make the tasks of ``ids`` ahead: probably the first batch of the next `tasks` call.

        The thread blocks the interpreter for about a millisecond. It starts after ``delay``
        seconds, so that the caller can send a message first.
        """
        if self._misses >= MISSES:
            return

        def make() -> Task:
            time.sleep(delay)
            return self._make(ids)

        with self._lock:
            if self._guess is not None:
                self._guess[1].cancel()
            self._guess = ids, _thread().submit(make)

    def _take(self, ids: Tensor) -> Future[Task]:
        """Return the tasks of ``ids``: from the guess if it was right, or made now."""
        with self._lock:
            guess, self._guess = self._guess, None
            if guess is not None:
                if torch.equal(guess[0], ids):
                    self._misses = 0
                    return guess[1]
                self._misses += 1
        made: Future[Task] = Future()
        made.set_result(self._make(ids))
        return made


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tasks")
