"""Norms and embeddings, which torch batches wrongly, written out (torch 2.15, float64, too).

``torch.func.vmap`` over the gradient of ``torch.func.grad`` is wrong for a layer, instance or batch
norm with a weight: by a fifth or far more, and without an error. Elementary operations give the
right result. Group norms and RMS norms stay torch's own. Under vmap, torch applies an embedding's
padding only to the first task, and counts its frequencies over all tasks together.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from maml.ops.refused import refuse_as_torch

_ARGUMENTS: dict[Callable[..., Any], list[str]] = {
    function: [*inspect.signature(function).parameters]
    for function in (F.layer_norm, F.instance_norm, F.batch_norm, F.embedding)
}
"""The argument names of torch's functions, in order."""
_OF_C = ("layer_norm", "native_layer_norm", "instance_norm", "batch_norm", "native_batch_norm")
for _name in _OF_C:
    _schema = getattr(torch.ops.aten, _name).default._schema
    _ARGUMENTS[getattr(torch, _name)] = [argument.name for argument in _schema.arguments]

_RUNNING = ("running_mean", "running_var")
_INSTANCES = (F.instance_norm, torch.instance_norm)
_WITH_STATISTICS = (torch.native_layer_norm, torch.native_batch_norm)
"""These return the mean and 1/σ as well."""


def _instead_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call in place of a function: over tasks, what torch batches rightly."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        given = dict(zip(_ARGUMENTS[function], args, strict=False)) | kwargs
        refuse_as_torch(function, **given)
        if function is F.embedding:
            return _embedded(**given)
        # With given statistics, a norm is a product and a sum: torch batches both correctly. Torch
        # itself refuses to update running statistics.
        if any(given.get(name) is not None for name in _RUNNING):
            return function(*args, **kwargs)
        return _normalised(function, **given)

    return call


def _embedded(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, **options: Any
) -> Tensor:
    """Return what ``F.embedding`` returns."""
    if options.get("scale_grad_by_freq") or options.get("max_norm") is not None:
        raise NotImplementedError("an embedding with scale_grad_by_freq or max_norm, batched")
    _check_rows(input, len(weight))
    rows = F.embedding(input, weight)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _is_recorded() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _check_rows(input: Tensor, n: int) -> None:
    """Refuse an index that torch, over tasks, would find in the rows of another task."""
    while is_functorch_wrapped_tensor(input):
        input = get_unwrapped(input)
    # While operations are recorded, numbers cannot be read.
    if input.device.type == "cpu" and input.numel() and not _is_recorded():
        low, high = input.aminmax()
        if low < 0 or high >= n:
            raise IndexError("index out of range in self")


def _normalised(
    func: Callable[..., Any],
    input: Tensor,
    normalized_shape: Any = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Any:
    """Return ``func``'s result: ``input`` normalised by its own statistics, scaled and shifted."""
    n = input.dim()
    if normalized_shape is not None:
        dims, shape = tuple(range(n - len(tuple(normalized_shape)), n)), None
    else:
        of_each = func in _INSTANCES
        dims, shape = (*(() if of_each else (0,)), *range(2, n)), (-1, *[1] * (n - 2))
    variance, mean = torch.var_mean(input, dim=dims, correction=0, keepdim=True)
    # A tensor, not a number: see `maml.networks.statistics.BatchNorm`.
    scale = torch.rsqrt(variance + variance.new_full((), eps))
    found = (input - mean) * scale
    if weight is not None:
        found = found * (weight if shape is None else weight.view(shape))
    if bias is not None:
        found = found + (bias if shape is None else bias.view(shape))
    if func not in _WITH_STATISTICS:
        return found
    return found, *(t if shape is None else t.flatten() for t in (mean, scale))


INSTEAD = {function: _instead_of(function) for function in _ARGUMENTS}
"""What to call in place of each of torch's functions."""
