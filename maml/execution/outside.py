"""What a user's code keeps outside of its network's modules: threads would share it.

Each thread calls a copy of the network (`maml.execution.threads`). But a loss that is a module, a
global, a closure's variable or an attribute of a class exists once. If a call writes there, it may
read it again, and another thread may have written in between. Torch's levels of forward derivatives
(`torch.func.jvp`) exist once, too.
"""

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd import forward_ad

Kept: TypeAlias = list[Any]
"""Values in a fixed order. The list holds them, so that no new value has the address of an old."""
LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy", "maml", "datasets"}
OF_GLOBALS = "_GLOBAL", "_GLOBALS", "_NAME"
"""Ends of the names of instructions that look up a global. ``co_names`` has attributes, too."""
MOST = 20_000
"""Look at no more values than this: a data set may be in reach, too."""


def kept_outside(owner: nn.Module, *functions: Any) -> Kept:
    """Return the values that the code of the owner's modules, and of functions, reaches by name."""
    seen = set(map(id, owner.modules()))
    waiting: deque[Any] = deque(functions)
    for part in owner.modules():
        waiting += [type(part), *filter(callable, vars(part).values())]
    found = Kept()
    while waiting and len(found) < MOST:
        value = waiting.popleft()
        if id(value) not in seen:
            seen.add(id(value))
            reached = list(_reached(value))
            waiting += reached
            found += reached
    return [*found, _levels]


def is_same(before: Kept, after: Kept) -> bool:
    """Return whether nothing was written between two calls of `kept_outside`."""
    if len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(a is b or (type(a) is type(b) is int and a == b) for a, b in pairs)


_levels = 0


def _enter(of_torch: Callable[[], int] = forward_ad.enter_dual_level) -> int:
    """Count a level of forward derivatives, and enter it."""
    global _levels
    _levels += 1
    return of_torch()


forward_ad.enter_dual_level = _enter


def _reached(value: Any) -> Iterator[Any]:
    """Yield what a value leads to, if it is of a user's own code."""
    if isinstance(value, Tensor):
        yield 0 if value.is_inference() else value._version
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | deque):
        yield from value
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield from (value.__func__, getattr(value, "__self__", None))
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, types.FunctionType) and _is_theirs(value):
        names = sorted(globals_of(value.__code__) & value.__globals__.keys())
        yield from (value.__globals__[name] for name in names)
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is empty
                yield None
    elif isinstance(value, type):
        # `copy.deepcopy` writes this name.
        own = vars(value).items() if _is_theirs(value) else ()
        yield from (held for name, held in own if name != "__slotnames__")
        yield from value.__bases__
    elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
        yield from (type(value), *vars(value).values())


@functools.cache
def globals_of(code: types.CodeType) -> set[str]:
    """Return the names of globals that code, and the functions inside it, look up."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname.endswith(OF_GLOBALS)}
    inside = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return found.union(*map(globals_of, inside))


def _is_theirs(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] not in LIBRARIES
