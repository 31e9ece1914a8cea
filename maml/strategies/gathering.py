"""Calls that wait for each other at one process, and hold no thread until they are answered."""

import dataclasses
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


@dataclasses.dataclass
class _Round:
    """What has come of a round, in whatever order: what all share, how many calls, those calls."""

    shared: Any = None
    expected: int | None = None
    calls: dict[int, Answer] = dataclasses.field(default_factory=dict)


class Gathering:
    """Gathers the calls of each round; the one that comes last computes the answers to all.

    What is computed does not depend on the order in which calls come: they go by their places.
    """

    def __init__(self, compute: Callable[[list[int], Any], Sequence[Any]]) -> None:
        """Gather for ``compute``, from places and what all share to an answer for each."""
        self._compute = compute
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}

    def begin(self, number: int, shared: Any, expected: int) -> None:
        """Take what the calls of round ``number`` share, and how many there are, at least 1."""
        with self._lock:
            of_round = self._rounds.setdefault(number, _Round())
            of_round.shared, of_round.expected = shared, expected
        self._compute_if_complete(number)

    def call(self, number: int, place: int) -> Answer:
        """Take a call of round ``number``, with a place of its own; return its answer to come."""
        answer: Answer = torch.futures.Future()
        with self._lock:
            self._rounds.setdefault(number, _Round()).calls[place] = answer
        self._compute_if_complete(number)
        return answer

    def _compute_if_complete(self, number: int) -> None:
        with self._lock:
            of_round = self._rounds.get(number)
            if of_round is None or of_round.expected != len(of_round.calls):
                return
            del self._rounds[number]
        places = sorted(of_round.calls)
        answers = [of_round.calls[place] for place in places]
        answer_all(answers, lambda: self._compute(places, of_round.shared))
