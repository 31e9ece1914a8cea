"""Where the processes of one start meet: under keys in the launcher's store that nobody has used.

A store may outlive the processes that it was for. torchrun keeps one through all its restarts, and
those who come after would find what those before have left: addresses at which nobody answers.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from maml.errors import WorkerLostError, timed_out

ANSWER = 1.0
"""Seconds after which a rank that has no answer looks whether rank 0 is another one by now."""


def meet(store: Store, rank: int, size: int, seconds: float) -> str:
    """Return the name of this start of ``size`` ranks: the same in all, and of no other start.

    Rank 0 thinks of it, and answers each of the others by a word of theirs. One that has found the
    name of an earlier start is not answered, nor is a process of another run.

    Args:
        store: The launcher's store.
        rank: This process's rank.
        size: How many processes there are.
        seconds: How long they wait for each other.

    Raises:
        WorkerLostError: on rank 0, naming the first that does not come.
        RuntimeError: on another rank, if rank 0 does not answer.
    """
    word = uuid.uuid4().hex
    deadline = time.monotonic() + seconds
    if rank == 0:
        store.set("start", word)
        for other in range(1, size):
            key = f"{word} {other}"
            try:
                store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                message = f"rank {other} did not come to the start within {seconds:g} s"
                raise WorkerLostError(message) from error
            store.set(f"{key} {store.get(key).decode()}", "")
        return word
    while time.monotonic() < deadline:
        try:
            store.wait(["start"], timedelta(seconds=ANSWER))
            name = store.get("start").decode()
            key = f"{name} {rank}"
            store.set(key, word)
            store.wait([f"{key} {word}"], timedelta(seconds=ANSWER))
        except RuntimeError as error:
            if not timed_out(error):
                raise
        else:
            return name
    raise RuntimeError(f"it did not answer within {seconds:g} s")
