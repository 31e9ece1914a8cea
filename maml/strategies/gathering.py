"""Calls that wait for each other at one process, and hold no thread until they are answered."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.rpc.internal import PythonUDF, RemoteException, _run_function

Answer: TypeAlias = torch.futures.Future[Any]


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
