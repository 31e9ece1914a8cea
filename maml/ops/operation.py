"""An operation whose first and second derivative are written out, for autograd and ``torch.func``.

A meta-gradient differentiates the gradient of the support loss. Let f be the operation, x its
inputs, c the cotangents of its outputs, and g(c, x) = (∂f/∂x)ᵀ c its gradient. The derivative of
⟨g(c, x), v⟩ has two parts:

    by c:  (∂f/∂x) v,                          the tangent of f along v;
    by x:  ∂/∂ε g(c, x + ε v) at ε = 0,        the tangent of the gradient along v.

So an operation states four functions: value, gradient, and the tangents of both along the inputs.
Any further derivative is torch's own, of `Operation.plain`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

Tensors: TypeAlias = Sequence[Tensor | None]


class Operation(ABC):
    """Maps input tensors to output tensors. It holds its settings, and no tensor.

    With leading dimensions, the same for all tensors, it computes each entry alone.
    """

    @abstractmethod
    def plain(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs, by operations that torch can differentiate any number of times."""

    @abstractmethod
    def value(self, *inputs: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs, and what the derivatives need in addition to the inputs."""

    @abstractmethod
    def gradient(self, inputs: Tensors, kept: Tensors, cotangents: Tensors) -> Tensors:
        """Return the gradient by each input. A cotangent may be None, which means zero."""

    @abstractmethod
    def tangents(
        self, inputs: Tensors, kept: Tensors, cotangents: Tensors, along: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Return the tangents of the outputs and of the gradients, along ``along`` in the inputs.

        A direction or a cotangent may be None, which means zero.
        """

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs, which autograd and ``torch.func`` can differentiate."""
        if forward_ad._current_level >= 0:  # a user's own forward derivative
            return self.plain(*inputs)
        device = next(t.device.type for t in inputs if t is not None)
        if torch.is_autocast_enabled(device):
            # Here, because a backward pass has no autocast.
            with torch.autocast(device, enabled=False):
                return self(*_as_autocast(inputs, device, exact=self.exact))
        found: tuple[Tensor, ...] = _Value.apply(self, *inputs)
        return found[: len(found) - self.n_kept]

    n_kept = 0
    """How many tensors `value` keeps."""
    exact = False
    """Whether it computes in the widest of its inputs' dtypes under autocast, not in autocast's."""


def _as_autocast(inputs: Tensors, device: str, *, exact: bool) -> Tensors:
    """Return the inputs in one dtype; autocast leaves float64 as it is."""
    kinds = [t.dtype for t in inputs if t is not None and t.is_floating_point()]
    widest = functools.reduce(torch.promote_types, kinds)
    is_wide = exact or widest == torch.float64
    dtype = widest if is_wide else torch.get_autocast_dtype(device)
    return [t if t is None or not t.is_floating_point() else t.to(dtype) for t in inputs]


class _Value(Function):
    """(operation, inputs) → outputs and kept tensors."""

    @staticmethod
    def forward(operation: Operation, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        outputs, kept = operation.value(*inputs)
        return *outputs, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operation, *own = inputs
        kept = output[len(output) - ctx.operation.n_kept :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*own, *kept)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        operation, saved = ctx.operation, ctx.saved_tensors
        of_outputs = cotangents[: len(cotangents) - operation.n_kept]
        if all(cotangent is None for cotangent in of_outputs):
            return (None,) * (1 + len(saved) - operation.n_kept)
        return None, *_Gradient.apply(operation, len(of_outputs), *of_outputs, *saved)

    @staticmethod
    def vmap(info: Any, in_dims: Any, operation: Operation, *inputs: Any) -> Any:
        return _of_each(_Value, info, in_dims[1:], inputs, operation)


class _Gradient(Function):
    """(operation, number of outputs, cotangents, inputs, kept) → gradients by the inputs."""

    @staticmethod
    def forward(operation: Operation, n: int, *given: Tensor | None) -> Any:
        cotangents, inputs, kept = _parts(operation, n, given)
        return tuple(operation.gradient(inputs, kept, cotangents))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operation, ctx.n, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> Any:
        operation, n = ctx.operation, ctx.n
        cotangents, inputs, kept = _parts(operation, n, ctx.saved_tensors)
        none = (None,) * len(kept)
        if all(v is None for v in along):
            return None, None, *((None,) * (n + len(inputs))), *none
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            found = _by_torch(operation, cotangents, inputs, along)
            return None, None, *found, *none
        of_outputs, of_gradients = operation.tangents(inputs, kept, cotangents, along)
        there = [None if c is None else t for c, t in zip(cotangents, of_outputs, strict=True)]
        return None, None, *there, *of_gradients, *none

    @staticmethod
    def vmap(info: Any, in_dims: Any, operation: Operation, n: int, *given: Any) -> Any:
        return _of_each(_Gradient, info, in_dims[2:], given, operation, n)


def _parts(operation: Operation, n: int, given: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    end = len(given) - operation.n_kept
    return given[:n], given[n:end], given[end:]


def _of_each(function: Any, info: Any, dims: Any, tensors: Tensors, *settings: Any) -> Any:
    """Give all tensors a leading dimension, which an operation computes entry by entry."""
    lifted = [
        t if t is None else _expanded(t, info) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]
    found = function.apply(*settings, *lifted)
    return found, tuple(None if part is None else 0 for part in found)


def _expanded(tensor: Tensor, info: Any) -> Tensor:
    return tensor.expand(info.batch_size, *tensor.shape)


def _by_torch(
    operation: Operation, cotangents: Tensors, inputs: Tensors, along: Tensors
) -> list[Tensor | None]:
    """Return the derivative of ⟨gradient, along⟩ by cotangents and inputs, by torch's own rules."""
    given = [*cotangents, *inputs]
    n = len(cotangents)
    floats = {
        i: t for i, t in enumerate(given) if t is not None and (i < n or along[i - n] is not None)
    }

    def gradient(own: dict[int, Tensor]) -> list[Tensor]:
        def outputs(at: dict[int, Tensor]) -> list[Tensor]:
            found = operation.plain(*((at | fixed).get(i) for i in range(n, len(given))))
            return [f for f, c in zip(found, cotangents, strict=True) if c is not None]

        at = {i: t for i, t in own.items() if i >= n}
        fixed = {i: t for i, t in enumerate(given) if i >= n and i not in at and t is not None}
        _, pull_back, *_ = torch.func.vjp(outputs, at)
        (found,) = pull_back([own[i] for i in range(n) if i in own])
        return [found[i] for i in sorted(at)]

    _, pull_back, *_ = torch.func.vjp(gradient, floats)
    (found,) = pull_back([v for v in along if v is not None])
    return [found.get(i) for i in range(len(given))]
