"""The compiled derivatives of a `Conv4` with a mean cross-entropy, and of its features.

What is compiled is a network's gradient and the product with its Hessian, nothing of a learner:
the meta-gradient around it is `maml.metagradient`'s for every network. Calls compute in the calling
thread and outside the interpreter's lock, so several threads may share one object.

Shape legend: B tasks, E examples, C H W, N ways, F filters, P weights, R residuals.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maml.kernels import library
from maml.kernels.derivatives import Gradient
from maml.networks.conv4 import Conv4, ConvBlock, is_headless
from maml.networks.norms import tensors
from maml.params import Params

_SUFFIX = {torch.float32: "f32", torch.float64: "f64"}


ALL = "all weights"
"""The one tensor of the kernels' coordinates: ``[B, P]``, all weights of a task end to end."""


class Point(NamedTuple):
    """Where a gradient was taken: the weights ``[B, P]`` and what the kernels kept ``[B, R]``."""

    weights: Tensor
    residuals: Tensor
    n_examples: int


_of_spare = threading.Lock()
_spare: list[Tensor] = []
"""Large residuals of points that are used up: fresh pages cost as much as a small layer's
arithmetic, and threads that touch theirs at once wait for each other in the operating system."""

_LARGE = 32 << 20
"""Bytes that glibc's malloc never keeps (its DEFAULT_MMAP_THRESHOLD_MAX); smaller blocks it does,
and learns from their being freed to keep others."""


def _take(like: Tensor, n_tasks: int, size: int) -> Tensor:
    """Return uninitialised residuals ``[B, R]``; if no spare ones fit, all are given up."""
    with _of_spare:
        for i, residuals in enumerate(_spare):
            if residuals.shape == (n_tasks, size) and residuals.dtype == like.dtype:
                return _spare.pop(i)
        # Sets of several sizes take turns. When others come, these are not asked for again.
        _spare.clear()
    return like.new_empty(n_tasks, size)


def _keep(residuals: Tensor) -> None:
    if residuals.nbytes > _LARGE:
        _spare.append(residuals)


class ConvNet:
    """A `Conv4`, with its head or without; float32 or float64 on the CPU.

    Its own coordinates are one tensor `ALL`, in which a convolution is ``[k, k, C, F]``. The biases
    of convolutions are absent: batch norm subtracts them again, and their gradient is zero.

    Attributes:
        absent: ``{name: shape}`` of these.
    """

    def __init__(self, network: Conv4, *, head: bool = True) -> None:
        """``head``: whether to compute the output layer, where there is one."""
        first = network.blocks[0]
        assert isinstance(first, ConvBlock)
        conv = first.conv
        channels, height, width = network.image_shape
        self._ways = network.head.out_features if head and not is_headless(network) else 0
        self.n_outputs = self._ways or network.n_features
        self._image_shape = network.image_shape
        self._statistics_shape = (len(network.blocks), 2, conv.out_channels)
        self._plan = _plan(
            channels, height, width, conv.out_channels, len(network.blocks),
            conv.kernel_size[0], conv.stride[0], int(conv.padding[0]), network.pool, network.mean,
            self._ways, first.norm.eps, first.leak,
        )  # fmt: skip
        parts = ("conv.weight", "norm.weight", "norm.bias")
        names = [f"blocks.{i}.{part}" for i in range(len(network.blocks)) for part in parts]
        weights = tensors(network)
        names += ["head.weight", "head.bias"] if self._ways else []
        self._shapes = {name: weights[name].shape for name in names}
        self._size = sum(shape.numel() for shape in self._shapes.values())
        assert self._size == _library().parameter_count(self._plan)
        biases = {f"blocks.{i}.conv.bias" for i in range(len(network.blocks))}
        self.absent = {name: weights[name].shape for name in weights if name in biases}

    def enter(self, weights: Params) -> Params:
        """See `Derivatives.enter`."""
        return {ALL: torch.cat([_turn(weights[name]).flatten() for name in self._shapes])}

    def leave(self, gradients: Params) -> Params:
        """See `Derivatives.leave`."""
        parts = gradients[ALL].split([shape.numel() for shape in self._shapes.values()])
        named = {
            name: _turn_back(part, shape)
            for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }
        return named | {name: parts[0].new_zeros(shape) for name, shape in self.absent.items()}

    def places(self, weights: Params) -> list[tuple[slice, Tensor]]:
        """Return where in `ALL` some of the weights lie, and their values there, flat."""
        found, end = [], 0
        for name, shape in self._shapes.items():
            begin, end = end, end + shape.numel()
            if name in weights:
                found.append((slice(begin, end), _turn(weights[name]).flatten()))
        return found

    def outputs(
        self, weights: Params, x: Tensor, statistics: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, E, N]``, and the batch norms' statistics ``[B, L, 2, F]``.

        Without a head features ``[B, E, F]`` take the place of logits.

        The forward pass alone: no labels, and nothing is kept for a backward pass.

        Args:
            weights: ``{ALL: [B, P]}``, see `enter`; shared weights are expanded over B (stride 0).
            x: ``[B, E, C, H, W]``.
            statistics: Mean and biased variance of each of the L blocks, to be used as they are, as
                `maml.networks.conv4.Statistics`. None: each set's own, which are returned.
        """
        n_tasks, n_examples = x.shape[:2]
        at, x = self._checked(weights, x), x.contiguous()
        logits = x.new_empty(n_tasks, n_examples, self.n_outputs)
        if statistics is None:
            used = x.new_empty(n_tasks, *self._statistics_shape)
        else:
            _check("statistics", statistics, (n_tasks, *self._statistics_shape), x.dtype)
            used = statistics.contiguous()

        def compute(first: int, last: int) -> None:
            _function("outputs", x.dtype)(
                self._plan, last - first, n_examples, _address(x, first), *_tasks(at, first),
                None if statistics is None else _address(used, first), _address(logits, first),
                _address(used, first),
            )  # fmt: skip

        _share_out(compute, n_tasks)
        return logits, used

    def _checked(self, weights: Params, x: Tensor) -> Tensor:
        """Return the weights ``[B, P]``, if they and the images are what the kernels can read."""
        at, shape = weights[ALL], x.shape[:2]
        if x.dtype not in _SUFFIX or 0 in shape[1:]:
            raise ValueError(f"images: {x.dtype} {list(x.shape)} is no set of float32 or float64")
        _check("images", x, (*shape, *self._image_shape), x.dtype)
        _check("weights", at, (shape[0], self._size), x.dtype)
        return at


class ConvNetLoss(ConvNet):
    """The mean cross-entropy of a `Conv4`: see `maml.kernels.derivatives.Derivatives`."""

    def gradient(self, weights: Params, x: Tensor, y: Tensor, *, again: bool) -> Gradient:
        """See `Derivatives.gradient`; y holds int64 class labels.

        Raises:
            ValueError: for a label that is none of 0 … N − 1, and for tensors of a wrong shape,
                dtype or device.
        """
        n_tasks, n_examples = x.shape[:2]
        at = self._checked(weights, x)
        _check("labels", y, (n_tasks, n_examples), torch.int64)
        x, y = x.contiguous(), y.contiguous()
        gradients = at.new_empty(at.shape)
        losses = x.new_empty(n_tasks)
        logits = x.new_empty(n_tasks, n_examples, self._ways)
        residuals = None
        if again:
            size = _function("residual_size", x.dtype)(self._plan, n_examples)
            residuals = _take(x, n_tasks, size)

        def compute(first: int, last: int) -> None:
            wrong = _function("gradient", x.dtype)(
                self._plan, last - first, n_examples, _address(x, first), _address(y, first),
                *_tasks(at, first), _address(losses, first), _address(logits, first),
                *_tasks(gradients, first),
                None if residuals is None else _address(residuals, first),
            )  # fmt: skip
            if wrong:
                label = int(y[first:].flatten()[wrong - 1])
                ways = self._ways
                raise ValueError(f"label {label} is none of 0 to {ways - 1} ({ways} ways)")

        _share_out(compute, n_tasks)
        point = None if residuals is None else Point(at, residuals, n_examples)
        return Gradient(losses, logits, {ALL: gradients}, point)

    def hessian_vector(
        self, point: Point, vector: Params, *, total: bool, again: bool = False
    ) -> Params:
        """See `Derivatives.hessian_vector`."""
        at, residuals, n_examples = point
        v = vector[ALL]
        _check("the vector", v, at.shape, at.dtype)

        def compute(first: int, last: int) -> Tensor:
            # Kernels overwrite a task's own result, and add to one that tasks share.
            shared = at.new_zeros(at.shape[1]) if total else None
            part = product[first:last] if shared is None else shared.expand(last - first, -1)
            _function("hessian_vector", residuals.dtype)(
                self._plan, last - first, n_examples, *_tasks(at, first),
                _address(residuals, first), *_tasks(v, first), *_tasks(part, 0),
            )  # fmt: skip
            return part[0]

        product = at.new_empty(0 if total else len(at), at.shape[1])
        parts = _share_out(compute, len(at))
        if not again:
            _keep(residuals)
        return {ALL: torch.stack(parts).sum(0) if total else product}


class ConvNetFeatures(ConvNet):
    """What a `Conv4` gives its head, and the way back from a gradient by these features."""

    def __init__(self, network: Conv4) -> None:
        super().__init__(network, head=False)

    def features(self, weights: Params, x: Tensor) -> tuple[Tensor, Point]:
        """Return features ``[B, E, F]``, normalised by each set's own statistics, and the point.

        ``weights`` and ``x`` are as `outputs` takes them.
        """
        n_tasks, n_examples = x.shape[:2]
        at, x = self._checked(weights, x), x.contiguous()
        found = x.new_empty(n_tasks, n_examples, self.n_outputs)
        residuals = _take(x, n_tasks, _function("residual_size", x.dtype)(self._plan, n_examples))

        def compute(first: int, last: int) -> None:
            _function("features", x.dtype)(
                self._plan, last - first, n_examples, _address(x, first), *_tasks(at, first),
                _address(found, first), _address(residuals, first),
            )  # fmt: skip

        _share_out(compute, n_tasks)
        return found, Point(at, residuals, n_examples)

    def pull_back(self, point: Point, cotangent: Tensor) -> Params:
        """Return a loss's gradient by the weights, ``{ALL: [B, P]}``; the point is then used up.

        ``cotangent`` is its gradient by the features of ``point``, ``[B, E, F]``.
        """
        at, residuals, n_examples = point
        given = cotangent.contiguous()
        _check("the cotangent", given, (len(at), n_examples, self.n_outputs), at.dtype)
        gradients = at.new_empty(at.shape)

        def compute(first: int, last: int) -> None:
            _function("pull_back", at.dtype)(
                self._plan, last - first, n_examples, *_tasks(at, first),
                _address(residuals, first), _address(given, first), *_tasks(gradients, first),
            )  # fmt: skip

        _share_out(compute, len(at))
        _keep(residuals)
        return {ALL: gradients}


@functools.cache
def _plan(
    channels: int, height: int, width: int, filters: int, layers: int, kernel: int, stride: int,
    padding: int, pool: bool, mean: bool, ways: int, eps: float, leak: float,
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
    made = _library().plan_new(layers, numbers, ways, int(mean), float(eps), float(leak))
    return ctypes.c_void_p(made)


def _function(name: str, dtype: torch.dtype) -> Any:
    return getattr(_library(), f"{name}_{_SUFFIX[dtype]}")


def _library() -> ctypes.CDLL:
    loaded = library.load()
    assert loaded is not None
    return loaded


def _share_out(compute: Callable[[int, int], Any], n_tasks: int) -> list[Any]:
    """Return ``compute(first, last)`` of ranges of tasks, one for each of torch's threads.

    The threads live on from call to call, and with them the kernels' working memory.
    """
    threads = min(torch.get_num_threads(), n_tasks)
    bounds = [n_tasks * i // max(threads, 1) for i in range(threads + 1)]
    if threads <= 1:
        return [compute(0, n_tasks)]
    others = [_pool(threads).submit(compute, *bounds[i : i + 2]) for i in range(1, threads)]
    return [compute(*bounds[:2]), *(other.result() for other in others)]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="convnet")


def _turn(weight: Tensor) -> Tensor:
    """Return a convolution's weight ``[F, C, k, k]`` as ``[k, k, C, F]``, another as it is."""
    return weight.permute(2, 3, 1, 0) if weight.dim() == 4 else weight


def _turn_back(part: Tensor, shape: torch.Size) -> Tensor:
    """Return the inverse of `_turn` of a flat part."""
    if len(shape) == 4:
        filters, channels, *kernel = shape
        return part.view(*kernel, channels, filters).permute(3, 2, 0, 1).contiguous()
    return part.view(shape)


def _check(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"{what}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}, where {dtype} "
            f"{list(shape)} on cpu is wanted"
        )


def _address(tensor: Tensor, first: int) -> int:
    """Return where task ``first`` of ``[B, …]`` begins."""
    return tensor.data_ptr() + first * tensor.stride(0) * tensor.element_size()


def _tasks(weights: Tensor, first: int) -> tuple[int, int]:
    """Return where task ``first`` of ``[B, P]`` begins, and the stride over tasks: 0 if shared."""
    if weights.stride(1) != 1:
        raise ValueError("the weights of a task must lie end to end")
    return _address(weights, first), weights.stride(0)
