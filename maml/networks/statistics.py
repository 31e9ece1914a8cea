"""Batch statistics, made explicit: no running buffer is shared between tasks.

Shape legend: E examples, C channels, H W pixels.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function, forward_ad

from maml.errors import UserError
from maml.ops.refused import refuse_as_torch

Statistics: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""(mean [C], biased variance [C]) of every normalisation, in order of use."""


class OneValueError(UserError, ValueError):
    """A set has one value a channel: normalised by itself, it would give the same for any input."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__(
            f"Expected more than 1 value per channel when training, got input size {[*size]}: by "
            "its own statistics, a batch norm gives one example the same answer as any other; give "
            'more examples, answer by the support set\'s statistics (batch_statistics="support"), '
            "or use a group or layer norm"
        )


class Tape:
    """The statistics of one forward pass of a network, in order of use."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, given: Statistics | None, used: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Begin a pass with ``given`` statistics, or go back to its place after ``used``."""
        self.given, self.used = given, list(used)

    def next(self, n: int) -> Statistics | None:
        """Return the given statistics of the next ``n`` normalisations; None if none were given."""
        return None if self.given is None else self.given[len(self.used) : len(self.used) + n]

    def __getstate__(self) -> dict[str, object]:
        # Drop a pass's tensors: they may belong to autograd or vmap, and have no later use.
        return {"given": None, "used": []}


class Taped(nn.Module):
    """A layer that takes its statistics from the tape of its network."""

    tape: Tape | None = None


EPS = 1e-3
"""The default ``eps`` of the batch norm layer in MAML's released code."""


def normalise(
    x: Tensor,
    given: tuple[Tensor, Tensor] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return batch-normalised ``x [E, C, …]``, and the mean and biased variance used, ``[C]``.

    ``given`` is used unchanged; None: the statistics of ``x`` are used. Scale and shift: ``[C]``.

    Raises:
        OneValueError: for the statistics of an ``x`` that has one value a channel.
        RuntimeError: for sizes and dtypes that torch's batch norm refuses.
    """
    if given is None and x.dim() > 1 and x.numel() == x.shape[1]:
        raise OneValueError(x.shape)
    mean, variance = given or (None, None)
    refuse_as_torch(F.batch_norm, x, mean, variance, weight, bias, given is None)
    # As fast as torch's own layer, but torch.func batches that layer's gradient wrongly.
    if given is None and not is_functorch_wrapped_tensor(x) and forward_ad._current_level < 0:
        found, mean, variance = _Fused.apply(x, weight, bias, eps)
        return found, (mean, variance)
    if mean is None or variance is None:
        variance, mean = torch.var_mean(x, dim=_all_but_channels(x), correction=0)
    # A tensor, because the forward derivative of "+ number" makes a zero on the CPU.
    scale = torch.rsqrt(variance + variance.new_full((), eps))
    if weight is not None:
        scale = weight * scale
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    return x * scale.view(shape) + shift.view(shape), (mean, variance)


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


class _Fused(Function):
    """Torch's batch normalisation with differentiable statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        found, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean.clone(), scale)
        return found, mean, scale**-2 - eps

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        of_found, of_mean, of_variance = cotangents
        x, weight, mean, scale = ctx.saved_tensors
        gradients: list[Tensor | None] = [None, None, None]
        if of_found is not None:
            # Torch can differentiate this again, by all inputs except mean and scale.
            gradients = list(
                torch.ops.aten.native_batch_norm_backward(
                    of_found, x, weight, None, None, mean, scale, True, ctx.eps,
                    list(ctx.needs_input_grad[:3]),
                )
            )  # fmt: skip
        if ctx.needs_input_grad[0] and not (of_mean is None and of_variance is None):
            dims = _all_but_channels(x)
            beside = x.new_zeros(x.shape[1]) if of_mean is None else of_mean
            shape = [-1 if d == 1 else 1 for d in range(x.dim())]
            by_x = beside.view(shape)
            if of_variance is not None:
                by_x = by_x + 2 * of_variance.view(shape) * (x - x.mean(dims, keepdim=True))
            by_x = (by_x / (x.numel() // x.shape[1])).expand_as(x)
            gradients[0] = by_x if gradients[0] is None else gradients[0] + by_x
        return *gradients, None


class BatchNorm(nn.Module):
    """Batch normalisation (arXiv:1502.03167) over ``x [E, C, H, W]`` without running statistics."""

    def __init__(self, channels: int, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self, x: Tensor, given: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the normalised ``x`` and the (mean, variance) that were used."""
        return normalise(x, given, self.weight, self.bias, self.eps)
