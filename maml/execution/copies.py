"""Deep copies of modules whose functions lead to the copies, not to the originals."""

import copy
import types
import weakref
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def closed_copy(module: M, memo: dict[int, Any]) -> M:
    """Return a deep copy that shares all tensors, and the values of ``memo``, ``{id: value}``.

    `copy.deepcopy` keeps functions, as ``lambda x: x * self.scale``, and weak references. Here they
    lead to the copied modules, if they are attributes, hooks, or in a list or dictionary. Both also
    share hooks that are no methods of a module: the user may read what these keep.
    """
    # Not `parameters`: in a by-reference clone, parameters are plain tensors.
    own = [(*part._parameters.values(), *part._buffers.values()) for part in module.modules()]
    memo |= {id(tensor): tensor for some in own for tensor in some if tensor is not None}
    memo |= {id(hook): hook for part in module.modules() for hook in own_hooks(part)}
    made = copy.deepcopy(module, memo)
    originals = {*module.modules()}
    shared = [type(part).__name__ for part in made.modules() if part in originals]
    if shared:
        raise TypeError(f"the copy of its {shared[0]} is the {shared[0]} itself")
    for part in made.modules():
        held = [value for value in vars(part).values() if isinstance(value, list | dict)]
        for place in (vars(part), *held):
            for where, value in list(
                place.items() if isinstance(place, dict) else enumerate(place)
            ):
                if (new := _led(value, memo)) is not value:
                    place[where] = new
    return made


def own_hooks(module: nn.Module) -> list[Any]:
    """Return a module's hooks without modules and their methods."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    hooks = (hook for kind in kinds for hook in getattr(module, kind).values())
    return [h for h in hooks if not isinstance(getattr(h, "__self__", h), nn.Module)]


def _led(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function or weak reference that leads to copies; return all others unchanged."""
    if type(value) is weakref.ref:
        target = value()
        return weakref.ref(memo[id(target)]) if id(target) in memo else value
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(
        types.CellType(memo[id(cell.cell_contents)]) if _reaches(cell, memo) else cell
        for cell in value.__closure__
    )
    if cells == value.__closure__:
        return value
    made = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def _reaches(cell: types.CellType, memo: dict[int, Any]) -> bool:
    try:
        return isinstance(cell.cell_contents, nn.Module) and id(cell.cell_contents) in memo
    except ValueError:  # it is empty
        return False
