"""Blocks by ``torch.utils.checkpoint`` have the weights of their call when they are computed again.

A call swaps a network's tensors for those of a task's step, and puts its own back. A block that is
computed once more on the way back would meet the wrong ones, without a word. So each checkpoint
remembers them, by torch's own ``context_fn``, for which a user's takes its place.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint as of_torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from maml.networks.alone import alone_with
from maml.networks.stack import remembering
from maml.networks.statistics import Tape

_local = threading.local()


@contextlib.contextmanager
def calling(network: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let checkpoints inside remember ``tensors``, by which ``network`` is called."""
    _install()
    before = getattr(_local, "now", None)
    _local.now = network, tensors
    try:
        yield
    finally:
        _local.now = before


class _Again(AbstractContextManager[None]):
    """The network as it was at a checkpoint; to be entered whenever that is computed again."""

    def __init__(self, network: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._network, self._tensors = network, tensors
        self._tape: Tape | None = getattr(network, "tape", None)
        self._given, self._used = self._tape.mark() if self._tape else (None, [])

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(alone_with(self._network))
        self._stack.enter_context(remembering(False))
        self._stack.enter_context(_reparametrize_module(self._network, self._tensors))
        self._stack.enter_context(calling(self._network, self._tensors))
        if self._tape:
            self._stack.callback(self._tape.wind, *self._tape.mark())
            self._tape.wind(self._given, self._used)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    now = getattr(_local, "now", None)
    if now is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return remembering(False), _Again(*now)


def _install() -> None:
    """Make that torch's default, which outside of a call is as it was."""
    if of_torch.noop_context_fn is not _contexts:
        # Torch tells by this name whether a user has given another one.
        of_torch.noop_context_fn = _contexts
        defaults = of_torch.checkpoint.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
        defaults["context_fn"] = _contexts
