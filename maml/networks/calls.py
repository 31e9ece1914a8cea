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

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from maml.networks.ordinary import own_name, swapped, tensors
from maml.networks.statistics import Statistics, Tape
from maml.ops.checkpoint import State, again_in
from maml.ops.instead import instead
from maml.params import Params, of_kind

_local = threading.local()
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def alone_with(network: nn.Module) -> AbstractContextManager[bool]:
    """Return a re-entrant context in which no other thread calls ``network``."""
    with _MAKING:
        return _LOCKS.setdefault(network, threading.RLock())


def apply(
    network: nn.Module, params: Params, x: Tensor, statistics: Statistics | None = None
) -> tuple[Tensor, Statistics]:
    """Apply ``network`` with those of ``params`` that have its own names to ``x [E, …]``.

    A network with parameters in bf16 gets its floats in bf16. Outputs have the dtype of ``params``.
    """
    # The examples cannot determine the outputs' dtype, because they may be integers.
    exact = next((p.dtype for p in params.values() if p.is_floating_point()), None)
    with alone_with(network):
        known = tensors(network)
        if any(known[n].dtype == torch.bfloat16 for n in params if n in known):
            x = pytree.tree_map_only(Tensor, _in_bf16, x)
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
            again_in(lambda: _state(network, given)),
            _nothing_escapes(network),
            instead(),
        ):
            outputs, used = network(x, statistics)
        written = getattr(_local, "written", None)
        if written is not None and network.training:
            own = [n for n in held if n not in tied and not n.endswith("num_batches_tracked")]
            written += (own_name(network, n) for n in own if _differs(held[n], given[n]))

    def made_exact(output: Tensor) -> Tensor:
        return output.to(exact) if output.is_floating_point() and exact is not None else output

    return pytree.tree_map_only(Tensor, made_exact, outputs), used


def _in_bf16(x: Tensor) -> Tensor:
    return x.bfloat16() if x.is_floating_point() else x


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


def _state(network: nn.Module, given: dict[str, Tensor]) -> State:
    """Return what brings the tensors of a call back into a network, and the tape's place of now."""
    tape: Tape = getattr(network, "tape", None) or Tape()  # else an unused tape
    place = tape.given, list(tape.used)

    @contextlib.contextmanager
    def state() -> Iterator[None]:
        with (
            alone_with(network),
            swapped(network, given),
            again_in(lambda: _state(network, given)),
        ):
            later = tape.given, list(tape.used)
            tape.begin(*place)
            try:
                yield
            finally:
                tape.begin(*later)

    return state
