"""Say what a meta-learner is made of, so that processes can compare theirs."""

import functools
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maml.config import OF_A_HOST
from maml.learners import Learner
from maml.networks.ordinary import own_name

OF_TORCH = vars(nn.Module()).keys()


def description(kind: type, learner: Learner, loss: Any, batching: str | None) -> dict[str, str]:
    """Return ``{what: value}`` of a meta-learner of a class: all but the values of its tensors.

    ``loss`` is a function, a module, or None.
    """
    values = {"the learner": kind.__name__}
    head = str(getattr(learner.network, "head_prefix", None))
    values["head"] = own_name(learner.network, head).rstrip(".")
    values |= {k: str(v) for k, v in vars(learner.config).items() if k not in OF_A_HOST}
    values["batching"] = str(batching or "auto")
    of_loss = f"{_name(loss)} (code {zlib.crc32(repr(_code(loss, set())).encode()):08x})"
    values["the loss"] = type(loss).__qualname__ if isinstance(loss, nn.Module) else of_loss
    for path, part in parts(learner, loss):
        by_torch = type(part).extra_repr.__module__.startswith("torch.")
        settings = part.extra_repr() if by_torch else ""  # a user's may be of this process alone
        mode = "" if part.training else " in evaluation mode"
        values[f"part {path}" if path else "the module"] = (
            f"{type(part).__qualname__}({settings}){mode}"
        )
        for name, parameter in part._parameters.items():
            values[f"{path}.{name}".lstrip(".")] = _form(parameter)
    return values


def held(learner: Learner, loss: Any) -> dict[str, Tensor]:
    """Return all tensors of a learner and of its loss by name, also those that attributes hold."""
    tensors = {}
    for path, part in parts(learner, loss):
        attributes = {n: v for n, v in vars(part).items() if n not in OF_TORCH}
        of_part = attributes | part._buffers | part._parameters
        for keys, value in pytree.tree_flatten_with_path(of_part)[0]:
            if isinstance(value, Tensor):
                key = pytree.keystr(keys).replace("['", ".").replace("']", "")
                tensors[f"{path}{key}".lstrip(".")] = value
    return tensors


def forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the dtype and the shape of each tensor, and whether it is a frozen parameter."""
    return {name: _form(tensor) for name, tensor in tensors.items()}


def parts(learner: Learner, loss: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a learner and its loss, each with its user's name for it."""
    for path, part in learner.named_modules(prefix="learner"):
        own = f"{path}.".removeprefix("learner.network.")
        yield (path if own == f"{path}." else own_name(learner.network, own)[:-1]), part
    yield from loss.named_modules(prefix="loss") if isinstance(loss, nn.Module) else ()


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{'frozen ' if frozen else ''}{dtype} {[*tensor.shape]}"


def _name(value: Any) -> str:
    own = value if hasattr(value, "__qualname__") else type(value)
    return f"{own.__module__}.{own.__qualname__}"


def _code(value: Any, seen: set[int]) -> Any:
    """Return what a function computes, as far as text tells: its code, and what it closes over."""
    if id(value) in seen:
        return None
    seen = seen | {id(value)}
    if isinstance(value, functools.partial):
        value = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        value = value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__
    elif isinstance(value, types.CodeType):
        value = value.co_code, value.co_names, value.co_consts
    elif isinstance(value, types.CellType):
        value = value.cell_contents if value != types.CellType() else None
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return [_code(each, seen) for each in value]
    plain = isinstance(value, int | float | complex | str | bytes | None)
    return value if plain else _name(value)
