"""Refuse what torch's own operation refuses, where other operations take its place."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Form(NamedTuple):
    """What torch may refuse of a tensor, and what makes another one like it."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device


def refuse_as_torch(function: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Raise what torch's ``function`` raises for tensors of these sizes, dtypes and devices.

    Torch itself is asked, with zeros, and only once for each form.
    """
    _ask(function, tuple(map(_form, given)), tuple((n, _form(v)) for n, v in named.items()))


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Form(value.shape, value.dtype, value.device)
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=4096)  # of what torch accepts: an error is raised each time
def _ask(function: Callable[..., Any], given: tuple[Any, ...], named: tuple[Any, ...]) -> None:
    def zeros(value: Any) -> Any:
        if not isinstance(value, _Form):
            return value
        return torch.zeros(value.size, dtype=value.dtype, device=value.device)

    with torch.no_grad():
        function(*map(zeros, given), **{name: zeros(value) for name, value in named})
