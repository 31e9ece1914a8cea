"""Blocks under ``torch.utils.checkpoint``, which a backward pass computes again.

By torch alone, a block is computed again with the tensors that its modules have by then, and by
functions of torch that other operations have replaced in the first call. Here it is computed again
in the state of its first call.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch.utils.checkpoint as of_torch

from maml.execution.meanwhile import Replaced

State: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which to compute a block again."""
_here = threading.local()


@contextlib.contextmanager
def again_in(state: Callable[[], State]) -> Iterator[None]:
    """Let the blocks of checkpoints within this context be computed again in a state.

    ``state`` is called when a block is computed for the first time. It may notice what changes.
    """
    before = getattr(_here, "states", ())
    _here.states = (*before, state)
    try:
        with _CHECKPOINTS:
            yield
    finally:
        _here.states = before


def inside() -> bool:
    """Return whether this thread computes a block of a checkpoint."""
    return getattr(_here, "inside", False)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    before = inside()
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = before


def _checkpoint(
    own: Callable[..., Any], block: Callable[..., Any], *given: Any, **options: Any
) -> Iterator[None]:
    """Do what torch's generator does, which a block's first computation divides."""
    states = [state() for state in _here.states]

    def again(*arguments: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for state in (*states, _inside):
                stack.enter_context(state())
            return block(*arguments, **named)

    with _inside():
        yield from own(again, *given, **options)


_NAMES = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
"""The generator behind a checkpoint: from torch 2.15 on, and before."""
_CHECKPOINTS = Replaced(of_torch, next(n for n in _NAMES if hasattr(of_torch, n)), _checkpoint)
