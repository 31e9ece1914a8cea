"""Normalisations, written out: their batched second derivative is wrong in torch.

``torch.func.vmap`` over the gradient of ``torch.func.grad`` of ``layer_norm``, ``instance_norm`` or
``batch_norm``, each with a weight, is off by up to a fifth (torch 2.15, the CPU, float64 too),
without an error. Written out in elementary operations they are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ExactNorms(TorchFunctionMode):
    """A context in which these normalisations are computed by elementary operations."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.layer_norm or func is torch.layer_norm:
            return _layer_norm(*args, **kwargs)
        if func is F.instance_norm and kwargs.get("running_mean") is None and len(args) < 2:
            return _instance_norm(*args, **kwargs)
        # By given statistics it is a product and a sum, which torch batches rightly.
        if func is F.batch_norm and args[1:3] == (None, None):
            return _batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = tuple(range(-len(tuple(normalized_shape)), 0))
    found = _normalised(input, dims, eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _instance_norm(
    input: Tensor,
    *,
    running_mean: None = None,
    running_var: None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    found = _normalised(input, tuple(range(2, input.dim())), eps)
    shape = (-1, *[1] * (input.dim() - 2))
    found = found if weight is None else found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)


def _batch_norm(
    input: Tensor,
    running_mean: None,
    running_var: None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    found = _normalised(input, (0, *range(2, input.dim())), eps)
    shape = (-1, *[1] * (input.dim() - 2))
    found = found if weight is None else found * weight.view(shape)
    return found if bias is None else found + bias.view(shape)


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    variance, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
    # A tensor, not a number: see `maml.networks.statistics.BatchNorm`.
    return (x - mean) * torch.rsqrt(variance + variance.new_full((), eps))
