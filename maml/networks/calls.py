"""A call of a network with the tensors of a task's step.

It swaps the network's own tensors for these, and back: so one thread at a time calls a network. And
a block by ``torch.utils.checkpoint``, which is computed once more on the way back, would meet the
wrong ones then, without a word. So each checkpoint remembers those of its call, by torch's own
``context_fn``, for which a user's takes its place.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as of_torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from maml.networks.stack import remembering
from maml.networks.statistics import Statistics, Tape
from maml.params import Params

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def alone_with(network: nn.Module) -> AbstractContextManager[bool]:
    """Return a context, to be entered any times, in which no other thread calls ``network``."""
    with _MAKING:
        return _LOCKS.setdefault(network, threading.RLock())


def apply(
    network: nn.Module, params: Params, x: Tensor, statistics: Statistics | None = None
) -> tuple[Tensor, Statistics]:
    """Apply ``network`` with ``params`` (its own names) to ``x [E, …]``."""
    with alone_with(network):
        # Copies: what the network writes into its buffers is gone after the call.
        buffers = {
            name: buffer.clone() for name, buffer in network.named_buffers() if name not in params
        }
        tied: dict[str, str] = getattr(network, "tied", {})
        buffers |= {name: params[own] for name, own in tied.items() if own in params}
        tensors = {**buffers, **params}
        # A layer in two places has its tensors once, by one name. Torch's own ties would swap them
        # twice, and leave the second one's tensors in the network.
        with _calling(network, tensors):
            outputs, used = torch.func.functional_call(
                network, tensors, (x, statistics), tie_weights=False
            )
    # What is computed from the outputs, a loss to begin with, is as exact as the parameters.
    # Examples do not say how exact: they may be integers.
    exact = next((p.dtype for p in params.values() if p.is_floating_point()), None)

    def made_exact(output: Any) -> Any:
        is_number = isinstance(output, Tensor) and output.is_floating_point()
        return output.to(exact) if is_number and exact is not None else output

    return pytree.tree_map(made_exact, outputs), used


# ---- checkpoints ---------------------------------------------------------------------------------

_local = threading.local()


@contextlib.contextmanager
def _calling(network: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
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
        self._tape: Tape = getattr(network, "tape", None) or Tape()  # one that nobody reads
        self._place = self._tape.given, list(self._tape.used)

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(alone_with(self._network))
        self._stack.enter_context(remembering(False))
        self._stack.enter_context(_reparametrize_module(self._network, self._tensors))
        self._stack.enter_context(_calling(self._network, self._tensors))
        self._stack.callback(self._tape.begin, self._tape.given, list(self._tape.used))
        self._tape.begin(*self._place)

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
