"""Layer, instance and batch norms over tasks, which torch batches wrongly (2.15, float64, too).

``torch.func.vmap`` over the gradient of ``torch.func.grad`` is wrong for such a norm with a weight:
by a fifth or far more, and without an error. Elementary operations give the right result. Group
norms and RMS norms stay torch's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maml.ops.refused import over_tasks

_OF_PYTHON = F.layer_norm, F.instance_norm, F.batch_norm
_OF_C = ("layer_norm", "native_layer_norm", "instance_norm", "batch_norm", "native_batch_norm")
_RUNNING = ("running_mean", "running_var")
_INSTANCES = (F.instance_norm, torch.instance_norm)
_WITH_STATISTICS = (torch.native_layer_norm, torch.native_batch_norm)
"""These return the mean and 1/σ as well."""


def _norm(function: Callable[..., Any], **given: Any) -> Any:
    """Return ``function``'s result over tasks."""
    # With given statistics, a norm is a product and a sum: torch batches both correctly. Torch
    # itself refuses to update running statistics.
    if any(given.get(name) is not None for name in _RUNNING):
        return function(**given)
    return _normalised(function, **given)


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


INSTEAD = {
    function: over_tasks(function, functools.partial(_norm, function))
    for function in (*_OF_PYTHON, *(getattr(torch, name) for name in _OF_C))
}
"""What to call in place of each of torch's functions."""
