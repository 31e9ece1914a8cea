"""Refuse what torch's own operation refuses, where other operations take its place."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def refuse_as_torch(function: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Raise what torch's ``function`` raises for tensors of these sizes, dtypes and devices.

    Torch itself is asked, with zeros, and only once for each form.
    """
    names = tuple((n, _form(v)) for n, v in named.items())
    _ask(function, tuple(map(_form, given)), names, torch.is_autocast_enabled("cpu"))


def over_tasks(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call in place of torch's ``function``: over tasks ``own``, by torch's names.

    ``own`` is called only with what ``function`` would take.
    """
    if inspect.isbuiltin(function):
        schema = getattr(torch.ops.aten, function.__name__).default._schema
        names = [argument.name for argument in schema.arguments]
    else:
        names = [*inspect.signature(function).parameters]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        refuse_as_torch(function, **given)
        return own(**given)

    return call


def _form(value: Any) -> Any:
    """Return what torch may refuse of a value: of a tensor its size, dtype and device."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=4096)  # of what torch accepts: an error is raised each time
def _ask(
    function: Callable[..., Any], given: tuple[Any, ...], named: tuple[Any, ...], *state: bool
) -> None:
    def zeros(form: Any) -> Any:
        if not (isinstance(form, tuple) and form and isinstance(form[0], torch.Size)):
            return form
        size, dtype, device = form
        return torch.zeros(size, dtype=dtype, device=device)

    with torch.no_grad():
        function(*map(zeros, given), **{name: zeros(form) for name, form in named})
