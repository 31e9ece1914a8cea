"""Refuse what torch's own operation refuses, where other operations take its place."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def refuse_as_torch(function: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Raise what torch's ``function`` raises for tensors of these sizes, dtypes and devices.

    Torch itself is asked, with zeros, and only once for each form.
    """
    _ask(function, tuple(map(_form, given)), tuple((n, _form(v)) for n, v in named.items()))


def _form(value: Any) -> Any:
    """Return what torch may refuse of a value: of a tensor its size, dtype and device."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=4096)  # of what torch accepts: an error is raised each time
def _ask(function: Callable[..., Any], given: tuple[Any, ...], named: tuple[Any, ...]) -> None:
    def zeros(form: Any) -> Any:
        if not (isinstance(form, tuple) and form and isinstance(form[0], torch.Size)):
            return form
        size, dtype, device = form
        return torch.zeros(size, dtype=dtype, device=device)

    with torch.no_grad():
        function(*map(zeros, given), **{name: zeros(form) for name, form in named})
