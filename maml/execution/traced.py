"""A small function that is called thousands of times, as the list of operations it comes to.

To find the operations of a `torch.func.vmap` of a few layers takes longer than to run them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

WORTH = 150
"""Calls after which a function is traced: by then they have cost what tracing costs."""


class Traced:
    """A function of tensors, traced for each shape that it is often called with.

    It is without gradients, and its operations do not depend on values. Copies are not traced.
    """

    def __init__(self, function: Callable[..., Any], each: bool = False) -> None:
        """``each``: the arguments have a leading dimension that ``function`` does not know of."""
        self._given = function, each
        self._function = torch.func.vmap(function) if each else function
        self._calls: Counter[Any] = Counter()
        self._graphs: dict[Any, Callable[..., Any]] = {}

    @torch.no_grad()
    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns."""
        tensors, spec = pytree.tree_flatten(arguments)
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        graph = self._graphs.get(key)
        if graph is None:
            self._calls[key] += 1
            if self._calls[key] <= WORTH:
                return self._function(*arguments)
            graph = self._graphs[key] = self._trace(spec, tensors)
        return graph(*tensors)

    def _trace(self, spec: Any, tensors: list[Tensor]) -> Callable[..., Any]:
        # Imported late: it brings a compiler.
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> Any:
            return self._function(*pytree.tree_unflatten(list(tensors), spec))

        return make_fx(flat)(*tensors)

    def __reduce__(self) -> Any:
        return Traced, self._given
