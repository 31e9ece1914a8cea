"""The compiled `SetLoss` of `maml.models.Conv4` with a mean cross-entropy.

What is compiled is a network's gradient and the product with its Hessian, nothing of a learner:
the meta-gradient around it is `maml.mixed`'s for every network. Calls compute in the calling thread
and outside the interpreter's lock, so several threads may share one object.

Shape legend: B tasks, E examples, C H W, N ways, F filters, R residuals.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maml.derivatives import Gradient
from maml.inner import Params
from maml.kernels import library
from maml.models import Conv4, ConvBlock

_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


class _Point(NamedTuple):
    """Where a gradient was taken: weights in kernel order, and what the kernels kept ``[B, R]``."""

    weights: list[Tensor]
    residuals: Tensor
    n_examples: int


class ConvNetLoss:
    """See `maml.derivatives.SetLoss`; float32 or float64 on the CPU."""

    def __init__(self, network: Conv4) -> None:
        first = network.blocks[0]
        assert isinstance(first, ConvBlock)
        conv = first.conv
        channels, height, width = network.image_shape
        self._ways = network.head.out_features
        self._plan = _plan(
            channels, height, width, conv.out_channels, len(network.blocks),
            conv.kernel_size[0], conv.stride[0], int(conv.padding[0]), network.pool, self._ways,
            first.norm.eps,
        )  # fmt: skip
        blocks = range(len(network.blocks))
        parts = ("conv.weight", "norm.weight", "norm.bias")
        self._names = [f"blocks.{i}.{part}" for i in blocks for part in parts]
        self._names += ["head.weight", "head.bias"]
        # Batch norm subtracts a convolution's bias again: its gradient is zero.
        self._biases = {f"blocks.{i}.conv.bias": conv.out_channels for i in blocks}

    def stored(self, weights: Params) -> Params:
        """See `SetLoss.stored`: convolution weights in the memory order of the kernels."""
        return {name: _shape(_order(tensor)) for name, tensor in weights.items()}

    def gradient(self, weights: Params, x: Tensor, y: Tensor, *, again: bool) -> Gradient:
        """See `SetLoss.gradient`; y holds int64 class labels."""
        suffix = _SUFFIX[x.dtype]
        n_tasks, n_examples = x.shape[:2]
        x, y = x.movedim(-3, -1).contiguous(), y.contiguous()
        ordered = [_order(weights[name]) for name in self._names]
        gradients = [w.new_empty(n_tasks, *w.shape[1:]) for w in ordered]
        losses = x.new_empty(n_tasks)
        logits = x.new_empty(n_tasks, n_examples, self._ways)
        size = _library()[f"residual_size_{suffix}"](self._plan, n_examples) if again else 0
        residuals = x.new_empty(n_tasks, size)
        _library()[f"gradient_{suffix}"](
            self._plan, n_tasks, n_examples, _address(x), _address(y), *_table(ordered),
            _address(losses), _address(logits), *_table(gradients),
            _address(residuals) if again else None,
        )  # fmt: skip
        point = _Point(ordered, residuals, n_examples) if again else None
        return Gradient(losses, logits, self._named(gradients, (n_tasks,)), point)

    def hessian_vector(self, point: _Point, vector: Params, *, total: bool) -> Params:
        """See `SetLoss.hessian_vector`."""
        weights, residuals, n_examples = point
        n_tasks = len(residuals)
        vectors = [_order(vector[name]) for name in self._names]
        if total:
            sums = [w.new_zeros(w.shape[1:]) for w in weights]
            # Kernels overwrite a task's own result, and add to one that tasks share.
            products = [s.expand(n_tasks, *s.shape) for s in sums]
        else:
            products = sums = [w.new_empty(n_tasks, *w.shape[1:]) for w in weights]
        _library()[f"hessian_vector_{_SUFFIX[residuals.dtype]}"](
            self._plan, n_tasks, n_examples, *_table(weights), _address(residuals),
            *_table(vectors), *_table(products),
        )  # fmt: skip
        return self._named(sums, () if total else (n_tasks,))

    def _named(self, values: Sequence[Tensor], leading: tuple[int, ...]) -> Params:
        """Return kernel-order values by name, with zeros for the convolutions' biases."""
        named = {n: _shape(v) for n, v in zip(self._names, values, strict=True)}
        zeros = {n: values[0].new_zeros(*leading, size) for n, size in self._biases.items()}
        return named | zeros


@functools.cache
def _plan(
    channels: int, height: int, width: int, filters: int, layers: int, kernel: int, stride: int,
    padding: int, pool: bool, ways: int, eps: float,
) -> ctypes.c_void_p:  # fmt: skip
    """Return the kernels' description of a network; a few are made, none is ever freed."""
    spec: list[int] = []
    for _ in range(layers):
        spec += [height, width, channels, filters, kernel, stride, padding, int(pool)]
        height, width = ((s + 2 * padding - kernel) // stride + 1 for s in (height, width))
        if pool:
            height, width = height // 2, width // 2
        channels = filters
    numbers = (ctypes.c_int64 * len(spec))(*spec)
    slope = 0.0
    return ctypes.c_void_p(
        _library().plan_new(layers, numbers, ways, int(not pool), slope, float(eps))
    )


def _library() -> ctypes.CDLL:
    loaded = library.load()
    assert loaded is not None
    return loaded


def _order(weight: Tensor) -> Tensor:
    """Return a weight as the kernels read it: convolutions as ``[…, k, k, C, F]``, in memory too.

    Its shape elsewhere stays torch's (`_shape`); element-wise arithmetic keeps the memory order,
    so that within an inner loop nothing is copied.
    """
    if weight.dim() >= 4:
        weight = weight.movedim((-2, -1, -3, -4), (-4, -3, -2, -1))
    one = weight[0] if weight.stride(0) == 0 else weight
    if one.is_contiguous():
        return weight
    return one.contiguous().expand(weight.shape) if one is not weight else weight.contiguous()


def _shape(weight: Tensor) -> Tensor:
    """Return a kernel-order weight in torch's shape, ``[…, F, C, k, k]``."""
    if weight.dim() >= 4:
        return weight.movedim((-4, -3, -2, -1), (-2, -1, -3, -4))
    return weight


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _table(tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return addresses and strides over tasks, in elements; a stride of 0 is a shared tensor."""
    n = len(tensors)
    return (
        (ctypes.c_void_p * n)(*(t.data_ptr() for t in tensors)),
        (ctypes.c_int64 * n)(*(t.stride(0) for t in tensors)),
    )
