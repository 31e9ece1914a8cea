"""Call a network with the tensors of a task's step.

A call swaps these tensors into the network and out again, so only one thread at a time calls a
network. The backward pass computes a block under ``torch.utils.checkpoint`` again, and would then
silently use wrong tensors. So each checkpoint remembers the tensors of its call.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as of_torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from maml.execution.meanwhile import Replaced
from maml.networks.ordinary import SECOND_ORDER, own_name, swapped, tensors
from maml.networks.stack import remembering
from maml.networks.statistics import Statistics, Tape
from maml.ops.instead import instead
from maml.params import Params, of_kind

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def alone_with(network: nn.Module) -> AbstractContextManager[bool]:
    """Return a re-entrant context in which no other thread calls ``network``."""
    with _MAKING:
        return _LOCKS.setdefault(network, threading.RLock())


def apply(
    network: nn.Module, params: Params, x: Tensor, statistics: Statistics | None = None
) -> tuple[Tensor, Statistics]:
    """Apply ``network`` with those of ``params`` that have its own names to ``x [E, …]``."""
    with alone_with(network):
        known = tensors(network)
        params = {n: of_kind(tensor, known[n]) for n, tensor in params.items() if n in known}
        # Copies, so that the network's writes into its buffers are gone after the call.
        # Modules may share one buffer; a module in two places has its buffers under one name.
        clones: dict[int, Tensor] = {}
        held = {name: t for name, t in known.items() if name not in params}
        buffers = {name: clones.setdefault(id(t), t.clone()) for name, t in held.items()}
        tied: dict[str, str] = getattr(network, "tied", {})
        buffers |= {name: params[own] for name, own in tied.items() if own in params}
        given = {**buffers, **params}
        if not torch.is_grad_enabled():  # else a module that enables gradients would keep a graph
            given = {name: tensor.detach() for name, tensor in given.items()}
        with (
            swapped(network, given),
            _calling(network, given),
            _nothing_escapes(network),
            instead(),
        ):
            outputs, used = network(x, statistics)
        written = getattr(_local, "written", None)
        if written is not None and network.training:
            own = [n for n in held if n not in tied and not n.endswith("num_batches_tracked")]
            written += (own_name(network, n) for n in own if _differs(held[n], given[n]))
    # Give the outputs, and so the loss, the precision of the parameters. The examples cannot
    # determine the precision, because they may be integers.
    exact = next((p.dtype for p in params.values() if p.is_floating_point()), None)

    def made_exact(output: Tensor) -> Tensor:
        return output.to(exact) if output.is_floating_point() and exact is not None else output

    return pytree.tree_map_only(Tensor, made_exact, outputs), used


@contextlib.contextmanager
def lost_writes(say: Callable[[str], None]) -> Iterator[None]:
    """Say one line if a call that this thread makes here writes a buffer, in training mode."""
    _local.written = []
    try:
        yield
        if _local.written:
            say(
                f"its buffer {_local.written[0]}: what forward writes there is lost after a call, "
                "so evaluation reads the value from before training; instead of running "
                "statistics, use the batch's in both modes, as batch norms do here"
            )
    finally:
        _local.written = None


def _differs(before: Tensor, now: Tensor | None) -> bool:
    counts = not before.dim() and before.dtype in (torch.int64, torch.int32, torch.bool)
    if not (before.is_floating_point() or counts) or before.layout != torch.strided:
        return False
    if not isinstance(now, Tensor) or now.shape != before.shape:
        return True
    return not torch.equal(before.nan_to_num(), now.nan_to_num())


@contextlib.contextmanager
def _nothing_escapes(network: nn.Module) -> Iterator[None]:
    """Take from the modules what they have kept of a batch that ``torch.func.vmap`` computes.

    Such a tensor is invalid after the batch, so the next call would fail.
    """
    within = torch._C._are_functorch_transforms_active()
    before = [(module, dict(vars(module))) for module in network.modules()] if within else []
    try:
        yield
    finally:
        for module, was in before:
            for name, value in [*vars(module).items()]:
                if value is was.get(name) or not isinstance(value, Tensor):
                    continue
                if is_functorch_wrapped_tensor(value):
                    vars(module).pop(name)
                    vars(module).update({name: was[name]} if name in was else {})


# ---- checkpoints ---------------------------------------------------------------------------------

_local = threading.local()


@contextlib.contextmanager
def _calling(network: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let checkpoints in this context remember ``tensors``, with which ``network`` is called."""
    before = getattr(_local, "now", None)
    _local.now = network, tensors
    try:
        with SECOND_ORDER, _CHECKPOINTS:
            yield
    finally:
        _local.now = before


def _again(block: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block that is computed again: with the tensors, and the tape's place, of now."""
    network, given = _local.now
    tape: Tape = getattr(network, "tape", None) or Tape()  # else an unused tape
    place = tape.given, list(tape.used)

    def again(*arguments: Any, **named: Any) -> Any:
        with (
            alone_with(network),
            remembering(False),
            swapped(network, given),
            _calling(network, given),
        ):
            later = tape.given, list(tape.used)
            tape.begin(*place)
            try:
                return block(*arguments, **named)
            finally:
                tape.begin(*later)

    return again


def _checkpoint(
    of_torch_itself: Callable[..., Any], block: Callable[..., Any], *given: Any, **options: Any
) -> Iterator[None]:
    """Let torch's checkpoint compute a block by `_again`."""
    with remembering(False):
        yield from of_torch_itself(_again(block), *given, **options)


_NAMES = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
"""The generator behind a checkpoint: from torch 2.15 on, and before."""
_CHECKPOINTS = Replaced(of_torch, next(n for n in _NAMES if hasattr(of_torch, n)), _checkpoint)
