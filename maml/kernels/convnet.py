"""The compiled passes over a stack of blocks, on tensors: see ``src/convnet.cpp``.

Calls compute in the calling thread and outside the interpreter's lock; several threads may call at
once. What a pass keeps for the next is a tensor of its own, so passes may follow in any order.

A tensor of B tasks has a leading dimension B; what they share has none, or one of stride 0.

Shape legend: B tasks, E examples, C H W, F filters, L blocks, n features, N ways, K what is kept.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maml.kernels import library
from maml.kernels.threads import by_threads, lent, n_threads

DTYPES = {torch.float32: "f32", torch.float64: "f64"}
"""Types of numbers, and what the names of their functions end in."""
Weights: TypeAlias = Sequence[Tensor]
"""In order: each block's convolution ``[F, C, 3, 3]``, scale and shift ``[F]``; then, if there is a
head, its weight ``[N, n]`` and bias ``[N]``. Biases of convolutions are absent: batch norm
subtracts them again."""


class Shape(NamedTuple):
    """What determines a network's passes; ``ways`` 0: it ends in the features."""

    image: tuple[int, int, int]
    filters: int
    layers: int
    pool: bool
    mean: bool
    eps: float
    leak: float
    ways: int = 0


class ConvNet:
    """The passes of one network; float32 or float64 on the CPU.

    ``ranks`` are the dimensions of each of the `Weights` of one task, ``size`` is P.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        channels, height, width = shape.image
        f = shape.filters
        spec: list[int] = []
        sizes: list[tuple[int, ...]] = []
        for _ in range(shape.layers):
            spec += [height, width, channels, f, 3, 1 if shape.pool else 2, 1, int(shape.pool)]
            sizes += [(f, channels, 3, 3), (f,), (f,)]
            height, width = (s // 2 if shape.pool else (s + 1) // 2 for s in (height, width))
            channels = f
        self.n_features = f if shape.mean else f * height * width
        if shape.ways:
            sizes += [(shape.ways, self.n_features), (shape.ways,)]
        # A weight's size, its strides in memory, and where it begins in [P].
        self._places: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        self.size = 0
        for size in sizes:
            self._places.append((size, _strides(size), self.size))
            self.size += math.prod(size)
        self.ranks = [len(size) for size in sizes]
        numbers = (ctypes.c_int64 * len(spec))(*spec)
        self._plan = ctypes.c_void_p(
            _library().plan_new(
                shape.layers, numbers, shape.ways, int(shape.mean), shape.eps, shape.leak
            )
        )

    def features(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[B, E, n]``, the statistics used ``[B, L, 2, F]``, and what is kept."""
        n_tasks, n, x, at = self._checked(weights, x)
        found, used = self._new(x, None)
        kept = lent(x.dtype, n_tasks, self._size("kept_size", x.dtype, n, 0))
        self._call("features", n_tasks, n, x, at, found, used, kept)
        return found, used, kept

    def outputs(self, weights: Weights, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `features` does, by ``given`` statistics or the sets' own; keep nothing."""
        n_tasks, n, x, at = self._checked(weights, x)
        found, used = self._new(x, given)
        self._call("outputs", n_tasks, n, x, at, None if given is None else used, found, used)
        return found, used

    def pull_back(
        self,
        weights: Weights,
        kept: Tensor,
        cotangent: Tensor,
        beside: Tensor | None = None,
        *,
        total: bool,
        again: bool = False,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the gradient by each weight, ``[B, …]`` or in ``total`` its sum, and what is kept.

        ``kept`` is as `features` returned it, ``cotangent`` the gradient by these, ``beside`` as
        `along` returned it, and used up. ``again``: whether `along` will be asked for; else nothing
        is kept.
        """
        at, cotangent = self._laid_out(weights), cotangent.contiguous()
        n_tasks, n, _ = cotangent.shape
        size = self._size("kept_size", at[0].dtype, n, 1)
        back = lent(at[0].dtype, n_tasks, size) if again else None
        found = self._result(cotangent, total=total, begun=beside)
        stride = 0 if beside is None else beside.stride(0)
        self._call("pull_back", n_tasks, n, at, kept, cotangent, beside, stride, found, back)
        return self.parts(found.get()), back

    def n_beside(self, dtype: torch.dtype, n: int) -> int:
        """Return how many numbers of a task `along` returns beside, of sets of ``n`` examples."""
        return self._size("injected_size", dtype, n) + self.size

    def along(
        self, weights: Weights, kept: Tensor, back: Tensor, v: Weights, n: int, *, total: bool
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        """Return the derivative of ``<g, v>`` for g that `pull_back` has returned, and a vector.

        It is that by the cotangent, ``[B, E, n]``, and the rest for `pull_back`; with ``total`` it
        also is a part of that by the weights, which is to be added. ``kept`` and ``back`` are as
        `features` and `pull_back` returned them, ``n`` is E.
        """
        n_tasks, at, v = len(kept), self._laid_out(weights), self._laid_out(v)
        by_cotangent = kept.new_empty(n_tasks, n, self.n_features)
        beside = lent(kept.dtype, n_tasks, self.n_beside(kept.dtype, n))
        found = self._result(kept, total=total, begun=beside)
        stride = beside.stride(0)
        self._call("along", n_tasks, n, at, kept, back, v, by_cotangent, beside, stride, found)
        return by_cotangent, beside, self.parts(found.get()) if total else None

    def gradient(
        self, weights: Weights, x: Tensor, y: Tensor, *, again: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the mean cross-entropy ``[B]``, logits, gradients ``[B, P]``, and what is kept.

        ``y`` is int64 labels ``[B, E]``; a ``ValueError`` names one that is none of 0 … N − 1.
        Nothing is kept unless `hessian_vector` will be asked for ``again``.
        """
        n_tasks, n, x, at = self._checked(weights, x)
        ways = self.shape.ways
        if y.shape != (n_tasks, n) or y.dtype != torch.int64:
            raise ValueError(f"labels: {y.dtype} {list(y.shape)}, not int64 [{n_tasks}, {n}]")
        y = y.contiguous()
        losses, logits = x.new_empty(n_tasks), x.new_empty(n_tasks, n, ways)
        kept = None
        if again:
            kept = lent(x.dtype, n_tasks, self._size("kept_loss_size", x.dtype, n))
        gradients = self._result(x, total=False)
        for first, wrong in self._call(
            "gradient", n_tasks, n, x, y, at, losses, logits, gradients, kept
        ):
            if wrong:
                label = int(y[first:].flatten()[wrong - 1])
                raise ValueError(f"label {label} is none of 0 to {ways - 1} ({ways} ways)")
        return losses, logits, gradients.get(), kept

    def hessian_vector(
        self, weights: Weights, kept: Tensor, v: Weights, n: int, *, total: bool
    ) -> Tensor:
        """Return the product of the Hessian with ``v``, ``[B, P]`` or its sum ``[P]``."""
        at, v = self._laid_out(weights), self._laid_out(v)
        found = self._result(kept, total=total)
        self._call("hessian_vector", len(kept), n, at, kept, v, found)
        return found.get()

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return views of ``[P]`` or ``[B, P]``, one for each weight."""
        *of_tasks, _ = flat.shape
        *stride, _ = flat.stride()
        begin = flat.storage_offset()
        return [
            flat.as_strided((*of_tasks, *size), (*stride, *strides), begin + offset)
            for size, strides, offset in self._places
        ]

    def _laid_out(self, weights: Weights) -> list[Tensor]:
        """Return weights as they lie in ``[P]``; a copy of those that lie otherwise."""
        found = []
        for weight, (size, strides, _) in zip(weights, self._places, strict=True):
            if weight.shape[-len(size) :] != size:
                raise ValueError(f"a weight is {list(weight.shape)}, not {list(size)}")
            if weight.stride()[-len(size) :] != strides:
                wanted = (*weight.shape[: -len(size)], *size)
                of_tasks = (math.prod(size),) * (len(wanted) - len(size))
                weight = torch.empty_strided(
                    wanted, (*of_tasks, *strides), dtype=weight.dtype
                ).copy_(weight)
            found.append(weight)
        return found

    def _checked(self, weights: Weights, x: Tensor) -> tuple[int, int, Tensor, list[Tensor]]:
        """Return B, E, and images and weights as the kernels can read them."""
        if x.dtype not in DTYPES or x.shape[2:] != self.shape.image or 0 in x.shape[1:2]:
            raise ValueError(f"images: {x.dtype} {list(x.shape)} is no set for {self.shape}")
        if any(w.dtype != x.dtype or w.device.type != "cpu" for w in (*weights, x)):
            raise ValueError(f"weights: not all are {x.dtype} on the CPU, as images are")
        return *x.shape[:2], x.contiguous(), self._laid_out(weights)

    def _new(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return memory for features, and for statistics or the given ones."""
        size = (len(x), self.shape.layers, 2, self.shape.filters)
        if given is not None and (given.shape != size or given.dtype != x.dtype):
            raise ValueError(f"statistics: {given.dtype} {list(given.shape)}, not {list(size)}")
        used = x.new_empty(size) if given is None else given.contiguous()
        return x.new_empty(*x.shape[:2], self.n_features), used

    def _size(self, what: str, dtype: torch.dtype, *numbers: int) -> int:
        return int(_function(what, dtype)(self._plan, *numbers))

    def _result(self, like: Tensor, *, total: bool, begun: Tensor | None = None) -> _Result:
        """Return where a pass writes by weight: over a task's own, onto what has ``begun``."""
        if total:
            return _Result(like.new_zeros(n_threads(len(like)), self.size), total=True)
        if begun is not None:
            return _Result(begun[:, -self.size :])
        return _Result(lent(like.dtype, len(like), self.size))

    def _call(self, name: str, n_tasks: int, n: int, *arguments: Any) -> list[tuple[int, int]]:
        """Call a pass for ranges of tasks; return where each began, and what it returned.

        An argument is a tensor ``[B, …]``, a number, None, `Weights` in a list, or a `_Result`.
        """
        dtype = next(a.dtype for a in arguments if isinstance(a, Tensor) and a.dtype in DTYPES)
        function = _function(name, dtype)
        vectors = self.shape.filters // (library.lanes(dtype.itemsize) or 1)
        team = min(torch.get_num_threads() // n_threads(n_tasks), vectors)

        def compute(thread: int, first: int, last: int) -> tuple[int, int]:
            given: list[Any] = []
            for each in arguments:
                if each is None or isinstance(each, int):
                    given.append(each)
                elif isinstance(each, _Result):
                    own = each.flat[thread] if each.total else each.flat
                    given += self._table(self.parts(own), first)
                elif isinstance(each, list):
                    given += self._table(each, first)
                else:
                    given.append(each.data_ptr() + first * each.stride(0) * each.element_size())
            return first, function(self._plan, last - first, n, team, *given)

        return by_threads(compute, n_tasks)

    def _table(self, weights: Sequence[Tensor], first: int) -> tuple[Any, Any]:
        """Return where each weight of task ``first`` lies, and strides: 0 if shared."""
        strides = [
            weight.stride(0) if weight.dim() > rank else 0
            for weight, rank in zip(weights, self.ranks, strict=True)
        ]
        bases = [
            weight.data_ptr() + first * stride * weight.element_size()
            for weight, stride in zip(weights, strides, strict=True)
        ]
        n = len(bases)
        return (ctypes.c_void_p * n)(*bases), (ctypes.c_int64 * n)(*strides)


class _Result(NamedTuple):
    """Each task's result by weight, ``[B, P]``; or, in ``total``, each thread's sum over tasks."""

    flat: Tensor
    total: bool = False

    def get(self) -> Tensor:
        """Return ``[B, P]``, or the sum ``[P]``."""
        if not self.total:
            return self.flat
        return self.flat[0] if len(self.flat) == 1 else self.flat.sum(0)


convnet = functools.cache(ConvNet)
"""The passes of a network; a few are made, none is ever freed."""


def lay_out(convolution: Tensor) -> Tensor:
    """Return a convolution's weight as it lies in memory for the kernels."""
    return convolution.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return a weight's strides: a convolution lies as ``[3, 3, C, F]``, another as it is."""
    if len(size) == 4:
        f, channels, *_ = size
        return (1, f, 3 * channels * f, channels * f)
    return (size[1], 1) if len(size) == 2 else (1,)


def _function(name: str, dtype: torch.dtype) -> Any:
    return getattr(_library(), f"{name}_{DTYPES[dtype]}")


def _library() -> ctypes.CDLL:
    loaded = library.load()
    assert loaded is not None
    return loaded
