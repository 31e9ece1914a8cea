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
    led = dict[int, Any]()
    for part in made.modules():
        held = [value for value in vars(part).values() if isinstance(value, list | dict)]
        for place in (vars(part), *held):
            for where, value in list(
                place.items() if isinstance(place, dict) else enumerate(place)
            ):
                if (new := _led(value, memo, led)) is not value:
                    place[where] = new
    return made


def own_hooks(module: nn.Module) -> list[Any]:
    """Return a module's hooks without modules and their methods."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    hooks = (hook for kind in kinds for hook in getattr(module, kind).values())
    return [h for h in hooks if not isinstance(getattr(h, "__self__", h), nn.Module)]


def _led(value: Any, memo: dict[int, Any], led: dict[int, Any]) -> Any:
    """Return a function or weak reference that leads to copies; return all others unchanged.

    A function leads to what it closes over, to its defaults, and to functions and tuples in these.
    ``led`` has the functions that lead to copies, by the ids of the originals.
    """
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if type(value) is weakref.ref:
        target = value()
        return weakref.ref(memo[id(target)]) if id(target) in memo else value
    if not _reaches(value, memo, set()) or id(value) in led:
        return led.get(id(value), value)
    if isinstance(value, tuple):
        return tuple(_led(each, memo, led) for each in value)
    # The other cells are kept, because other functions may share and change them.
    before = value.__closure__ or ()
    cells = [types.CellType() if _reaches(cell, memo, set()) else cell for cell in before]
    defaults = _led(value.__defaults__, memo, led)
    function = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, defaults, tuple(cells)
    )
    led[id(value)] = function
    named = value.__kwdefaults__ or {}
    function.__kwdefaults__ = {name: _led(each, memo, led) for name, each in named.items()}
    function.__dict__ |= value.__dict__
    for cell, new in zip(before, cells, strict=True):
        if new is not cell:
            new.cell_contents = _led(cell.cell_contents, memo, led)
    return function


def _reaches(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Return whether a value leads to a copied module, as a function that closes over one."""
    if isinstance(value, nn.Module):
        return id(value) in memo
    if id(value) in seen:
        return False
    seen.add(id(value))
    parts: tuple[Any, ...] = value if type(value) is tuple else ()
    if isinstance(value, types.CellType) and value != types.CellType():  # it is not empty
        parts = (value.cell_contents,)
    if isinstance(value, types.FunctionType):
        parts = (value.__closure__, value.__defaults__, *(value.__kwdefaults__ or {}).values())
    return any(_reaches(part, memo, seen) for part in parts)
