"""Calls of a step that wait at a worker: computed as one batch, answered one by one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.rpc.internal import PythonUDF, RemoteException, _run_function


@dataclasses.dataclass
class _Step:
    """What has come of a step, in whatever order: its parameters, how many calls, those calls."""

    flat: Tensor | None = None
    expected: int | None = None
    calls: list[tuple[int, torch.futures.Future[Tensor]]] = dataclasses.field(default_factory=list)


class Gathering:
    """Gathers the calls of each step, one a task; the one that comes last computes them all.

    A call that waits holds no thread. What is computed does not depend on the order in which
    calls come: tasks go in the order of their ids.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Gather for ``compute``, from task ids ``[B]`` and parameters ``[P]`` to rows ``[B, …]``.

        A row of the result answers the call for the task at its place.
        """
        self._compute = compute
        self._lock = threading.Lock()
        self._steps: dict[int, _Step] = {}

    def begin(self, number: int, flat: Tensor, expected: int) -> None:
        """Take the parameters of a step, and how many calls it has for this worker, at least 1."""
        with self._lock:
            step = self._steps.setdefault(number, _Step())
            step.flat, step.expected = flat, expected
        self._compute_if_complete(number)

    def call(self, number: int, task: Tensor) -> torch.futures.Future[Tensor]:
        """Take a call for a task, by its id, 0-d; return its answer to come."""
        answer: torch.futures.Future[Tensor] = torch.futures.Future()
        with self._lock:
            step = self._steps.setdefault(number, _Step())
            step.calls.append((int(task), answer))
        self._compute_if_complete(number)
        return answer

    def _compute_if_complete(self, number: int) -> None:
        with self._lock:
            step = self._steps.get(number)
            if step is None or step.expected != len(step.calls):
                return
            del self._steps[number]
        step.calls.sort(key=lambda call: call[0])
        ids = torch.tensor([task for task, _ in step.calls])
        # As RPC runs a function: it turns an exception into what the caller will raise.
        rows = _run_function(PythonUDF(self._compute, (ids, step.flat), {}))
        failed = isinstance(rows, RemoteException)
        answers = [rows] * len(ids) if failed else rows.unbind()
        for (_, answer), row in zip(step.calls, answers, strict=True):
            answer.set_result(row)
