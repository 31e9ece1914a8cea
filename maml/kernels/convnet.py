"""Run the compiled passes over a stack of blocks, on tensors: see ``src/convnet.cpp``.

A call computes in the calling thread and a pool, without the interpreter's lock. Several threads
may call at once. Each pass keeps its data in a separate tensor, so passes may run in any order.

A tensor of B tasks has a leading dimension B. A shared tensor has none, or one of stride 0.

Shape legend: B tasks, E examples, C H W, F filters, L blocks, n features, N ways, K numbers kept.
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
"""The supported dtypes, and the suffix of the compiled functions for each."""
Weights: TypeAlias = Sequence[Tensor]
"""In order: each block's convolution ``[F, C, 3, 3]``, scale and shift ``[F]``; if there is a head,
then its weight ``[N, n]`` and bias ``[N]``. Convolutions have no biases here, because batch norm
subtracts biases."""


class Shape(NamedTuple):
    """The settings that determine a network's passes; ``ways`` 0: the network has no head."""

    image: tuple[int, int, int]
    filters: int
    layers: int
    pool: bool
    mean: bool
    eps: float
    leak: float
    ways: int = 0


class ConvNet:
    """The passes of one network, in float32 or float64 on the CPU.

    ``ranks``: how many dimensions each weight of one task has. ``size``: P, their total size.
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
        # Each weight's size, its strides in memory, and its offset in [P].
        self._places: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        self.size = 0
        for size in sizes:
            weight = torch.empty(size)
            strides = lay_out(weight).stride() if len(size) == 4 else weight.stride()
            self._places.append((size, strides, self.size))
            self.size += math.prod(size)
        self.ranks = [len(size) for size in sizes]
        numbers = (ctypes.c_int64 * len(spec))(*spec)
        self._plan = ctypes.c_void_p(
            _library().plan_new(
                shape.layers, numbers, shape.ways, int(shape.mean), shape.eps, shape.leak
            )
        )

    def features(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features ``[B, E, n]``, statistics used ``[B, L, 2, F]``, kept maps ``[B, K]``."""
        n_tasks, n, x, at = self._checked(weights, x)
        found, used = self._new(x, None)
        kept = lent(x.dtype, n_tasks, self._size("kept_size", x.dtype, n, 0))
        self._call("features", n_tasks, n, x, at, found, used, kept)
        return found, used, kept

    def outputs(self, weights: Weights, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return features and statistics used: ``given``, or each set's own. Keep nothing."""
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
        """Return the gradient by each weight, and the maps kept for `along` or None.

        A gradient is ``[B, …]``, or with ``total`` its sum over tasks. ``kept`` comes from
        `features`, and ``beside`` from `along`; this call may overwrite ``beside``. ``cotangent``
        is the gradient by the features. Set ``again`` to keep the maps for a later `along`.
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
        """Return how many numbers `along` returns in ``beside`` for a task with ``n`` examples."""
        return self._size("injected_size", dtype, n) + self.size

    def along(
        self, weights: Weights, kept: Tensor, back: Tensor, v: Weights, n: int, *, total: bool
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        """Differentiate ``<g, v>``, where g is the gradient that `pull_back` returned.

        Return the derivative by the cotangent, ``[B, E, n]``; ``beside``, the rest for the next
        `pull_back`; and with ``total`` the direct derivative by the weights, for the caller to add.
        ``kept`` comes from `features`, ``back`` from `pull_back`. ``n`` is E.
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
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
        """Return the mean cross-entropy ``[B]``, logits, gradients by weight, kept maps or None.

        ``y`` holds int64 labels ``[B, E]``. Raise ``ValueError`` for a label outside 0 … N − 1.
        Set ``again`` to keep the maps for a later call of `hessian_vector`.
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
        return losses, logits, self.parts(gradients.get()), kept

    def hessian_vector(
        self, weights: Weights, kept: Tensor, v: Weights, n: int, *, total: bool
    ) -> list[Tensor]:
        """Return the Hessian times ``v`` by weight, ``[B, …]``, or with ``total`` the sum."""
        at, v = self._laid_out(weights), self._laid_out(v)
        found = self._result(kept, total=total)
        self._call("hessian_vector", len(kept), n, at, kept, v, found)
        return self.parts(found.get())

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
        """Return weights with the strides that they have in ``[P]``; copy if strides differ."""
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
        """Return memory for features, and the given statistics or memory for new ones."""
        size = (len(x), self.shape.layers, 2, self.shape.filters)
        if given is not None and (given.shape != size or given.dtype != x.dtype):
            raise ValueError(f"statistics: {given.dtype} {list(given.shape)}, not {list(size)}")
        used = x.new_empty(size) if given is None else given.contiguous()
        return x.new_empty(*x.shape[:2], self.n_features), used

    def _size(self, what: str, dtype: torch.dtype, *numbers: int) -> int:
        return int(_function(what, dtype)(self._plan, *numbers))

    def _result(self, like: Tensor, *, total: bool, begun: Tensor | None = None) -> _Result:
        """Return the memory for a pass's result by weight: new, or the last P of ``begun``."""
        if total:
            return _Result(like.new_zeros(n_threads(len(like)), self.size), total=True)
        if begun is not None:
            return _Result(begun[:, -self.size :])
        return _Result(lent(like.dtype, len(like), self.size))

    def _call(self, name: str, n_tasks: int, n: int, *arguments: Any) -> list[tuple[int, int]]:
        """Call a pass for ranges of tasks; return each range's first task and status.

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
        """Return each weight's address for task ``first`` and stride over tasks (0: shared)."""
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
    """Each task's result by weight, ``[B, P]``; with ``total``, each thread's sum over tasks."""

    flat: Tensor
    total: bool = False

    def get(self) -> Tensor:
        """Return ``[B, P]``, or the sum ``[P]``."""
        if not self.total:
            return self.flat
        return self.flat[0] if len(self.flat) == 1 else self.flat.sum(0)


convnet = functools.cache(ConvNet)
"""Return the passes of a network. The cache never frees them, because a process needs few."""


def lay_out(convolution: Tensor) -> Tensor:
    """Return a convolution's weight, stored in the kernels' memory order ``[3, 3, C, F]``."""
    return convolution.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def _function(name: str, dtype: torch.dtype) -> Any:
    return getattr(_library(), f"{name}_{DTYPES[dtype]}")


def _library() -> ctypes.CDLL:
    loaded = library.load()
    assert loaded is not None
    return loaded
