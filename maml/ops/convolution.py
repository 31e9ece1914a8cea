"""Convolution with weights of each task's own, in any number of dimensions, twice differentiable.

Over tasks, torch computes one convolution with the tasks as groups, but the second derivative of a
convolution with groups is a loop over them. A convolution x ∗ w is linear in both, so its
derivatives are convolutions with groups again:

    tangent:               x' ∗ w + x ∗ w'
    gradient:              dx = do ⋆ w,              dw = do ⋆ x
    the gradient's tangent: do ⋆ w' by x,            do ⋆ x' by w

Shape legend: G tasks, E examples, C and O channels in and out, S and K sizes of image and kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maml.ops.operation import Operation, Tensors


@dataclass(frozen=True)
class Convolution(Operation):
    """``x [E, C, S…], w [O, C/groups, K…]`` → ``[E, O, S'…]``; transposed:
    ``w [C, O/groups, K…]``.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def plain(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """See `Operation.plain`."""
        x, w = (t for t in inputs if t is not None)
        if x.dim() > 2 + len(self.stride):
            return (torch.func.vmap(lambda *own: self.plain(*own)[0])(x, w),)
        return (self._convolve(x, w, 1),)

    def value(self, *inputs: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `Operation.value`."""
        x, w = (t for t in inputs if t is not None)
        return (self._of_tasks(x, w),), ()

    def gradient(self, inputs: Tensors, kept: Tensors, cotangents: Tensors) -> Tensors:
        """See `Operation.gradient`."""
        x, w = inputs
        (do,) = cotangents
        assert x is not None and w is not None and do is not None
        return self._pull(do, x, w, (True, True))

    def tangents(
        self, inputs: Tensors, kept: Tensors, cotangents: Tensors, along: Tensors
    ) -> tuple[Tensors, Tensors]:
        """See `Operation.tangents`."""
        x, w = inputs
        (do,) = cotangents
        assert x is not None and w is not None and do is not None
        of_x, of_w = along
        parts: list[Tensor] = []
        by_x = by_w = None
        if of_x is not None:
            parts.append(self._of_tasks(of_x, w))
            by_w = self._pull(do, of_x, w, (False, True))[1]
        if of_w is not None:
            parts.append(self._of_tasks(x, of_w))
            by_x = self._pull(do, x, of_w, (True, False))[0]
        return (sum(parts[1:], parts[0]),), (by_x, by_w)

    # ---- tasks as groups

    def _convolve(self, x: Tensor, w: Tensor, n_tasks: int) -> Tensor:
        return torch.convolution(
            x, w, None, self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding or (0,) * len(self.stride), self.groups * n_tasks,
        )  # fmt: skip

    def _of_tasks(self, x: Tensor, w: Tensor) -> Tensor:
        lead = x.shape[: -2 - len(self.stride)]
        flat, n_tasks = self._as_groups(x), lead.numel()
        return self._as_tasks(self._convolve(flat, self._weights(w), n_tasks), lead)

    def _pull(
        self, do: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        lead = x.shape[: -2 - len(self.stride)]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            self._as_groups(do), self._as_groups(x), self._weights(w), None, self.stride,
            self.padding, self.dilation, self.transposed,
            self.output_padding or (0,) * len(self.stride),
            self.groups * lead.numel(), (*wanted, False),
        )  # fmt: skip
        return (
            self._as_tasks(dx, lead) if wanted[0] else None,
            dw.view(w.shape) if wanted[1] else None,
        )

    def _as_groups(self, x: Tensor) -> Tensor:
        """Return ``[…, E, C, S…]`` as ``[E, G·C, S…]``."""
        own = x.shape[-2 - len(self.stride) :]
        flat = x.reshape(-1, *own)
        return flat.transpose(0, 1).reshape(own[0], -1, *own[2:])

    def _as_tasks(self, x: Tensor, lead: torch.Size) -> Tensor:
        """Return ``[E, G·C, S…]`` as ``[…, E, C, S…]``."""
        n_tasks = lead.numel()
        found = x.unflatten(1, (n_tasks, -1)).transpose(0, 1)
        return found.reshape(*lead, *found.shape[1:])

    def _weights(self, w: Tensor) -> Tensor:
        return w.reshape(-1, *w.shape[-1 - len(self.stride) :])


def _convolution(
    n: int, of_torch: Callable[..., Tensor], *, transposed: bool
) -> Callable[..., Any]:
    """Return a function with the arguments of ``torch.conv1d`` and so on, in n dimensions."""

    def each(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * n if isinstance(value, int) else tuple(value) * (n // len(value))

    def call(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *others: Any,
        **named: Any,
    ) -> Tensor:
        # Alone, a task's convolution has no groups of tasks: torch's own is right and fast.
        if not torch._C._are_functorch_transforms_active() or input.dim() != n + 2:
            return of_torch(input, weight, bias, stride, padding, *others, **named)
        order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        given = dict(zip(order, others, strict=False)) | named
        dilation, sizes = each(given.get("dilation", 1)), weight.shape[2:]
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
            uneven = [side for t in reversed(total) for side in (0, t % 2)]
            input, padding = F.pad(input, uneven), [t // 2 for t in total]
        operation = Convolution(
            each(stride),
            each(0 if padding == "valid" else padding),
            dilation,
            given.get("groups", 1),
            transposed,
            each(given.get("output_padding", 0)),
        )
        (found,) = operation(input, weight)
        return found if bias is None else found + bias.to(found.dtype).view(-1, *(1,) * n)

    return call


_OF_TORCH: dict[bool, tuple[Callable[..., Any], ...]] = {
    False: (torch.conv1d, torch.conv2d, torch.conv3d),
    True: (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
}
INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    function: _convolution(n, function, transposed=transposed)
    for transposed, functions in _OF_TORCH.items()
    for n, function in enumerate(functions, 1)
}
"""What to call in place of each of torch's functions."""
