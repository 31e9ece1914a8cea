"""What code reaches by name, what it holds there, and how to put this back.

Each thread calls a copy of the network (`maml.execution.threads`). But a loss that is a module, a
global, a closure's variable or an attribute of a class exists once. If a call writes there, it may
read it again, and another thread may have written in between. Torch's levels of forward derivatives
(`torch.func.jvp`) exist once, too. And what a call on trial has written there is put back.
"""

import copyreg
import dis
import functools
import logging
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from maml.execution.copies import own_hooks
from maml.execution.meanwhile import Replaced

LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "numpy", "maml", "datasets"}
LIBRARIES |= {"transformers", "peft"}
HOLDERS = re.compile(
    r"(types|functools|argparse|maml\.(library\.around|metagradient\.problem)"
    r"|torch\.nn\.(modules|utils)|transformers|peft)\b"
)
"""The Python modules of those objects of libraries that hold what a user gave them."""
OF_GLOBALS = "_GLOBAL", "_GLOBALS", "_NAME"
"""Ends of the names of instructions that look up a global. ``co_names`` has attributes, too."""
Held: TypeAlias = dict[Any, Any] | list[Any] | int | bytes
_CONTAINERS: tuple[Any, ...] = list, tuple, set, frozenset, deque
MOST_BYTES = 4096
"""Look at the numbers in an array of numpy up to this size."""
MOST = 20_000
"""Look at no more values than this: a data set may be in reach, too."""


class Reached:
    """The values that code reaches by name, and what they hold now.

    Attributes:
        values: These values, in a fixed order. The list keeps them, so that no new value has the
            address of an old one.
        is_whole: False if a call may write what `put_back` would miss: there is an object that
            cannot be copied, as a lock or an open file, or there are more than `MOST` values.
        sees_all: False if a value may change and `is_same` would miss it, as in a large array.
    """

    def __init__(self, *roots: Any, without: Iterable[nn.Module | Tensor] = ()) -> None:
        """Look from ``roots`` on; not into modules ``without``, nor at such tensors' numbers."""
        self.values: list[Any] = []
        self.is_whole = self.sees_all = True
        self._held: list[tuple[Any, Any]] = []
        self._glance: _Glance | None = None
        seen = set(map(id, without))
        waiting = deque(roots)
        while waiting and len(self.values) < MOST:
            value = waiting.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            self.values.append(value)
            if (held := _held(value)) is not None:
                self._held.append((value, held))
                if isinstance(held, dict | list):
                    parts = held.values() if isinstance(held, dict) else held
                    # What a function reads of a module is held, by name.
                    of_code = isinstance(value, types.FunctionType)
                    waiting += [p for p in parts if not (of_code and type(p) is types.ModuleType)]
            waiting += (more := list(_leads_to(value)))
            self.sees_all &= held is not None or bool(more) or _is_constant(value)
            self.is_whole &= held is not None or bool(more) or _can_be_copied(value)
        self.is_whole &= not waiting
        self.sees_all &= self.is_whole

    def form(self, name: Callable[[Any], Any]) -> Any:
        """Return what is equal if another code reaches values of the same ``name`` in all places.

        A place of a value that was there before has its number: the code may hold one value twice.
        """
        number = {id(value): i for i, value in enumerate(self.values)}
        found = list[Any]()
        for value in self.values:
            held = _held(value)
            names = (*held,) if isinstance(held, dict) else ()
            parts = held.values() if isinstance(held, dict) else held
            inside = chain(parts if isinstance(parts, Iterable) else (), _leads_to(value))
            found.append((name(value), names, *(number.get(id(part)) for part in inside)))
        return tuple(found)

    def is_same(self) -> bool:
        """Return whether nothing was written since."""
        return all(_is_same(held, _held(value)) for value, held in self._held)

    def is_still_same(self) -> bool:
        """Return the same as `is_same`, in a tenth of its time from the second call on."""
        if self._glance is not None and self._glance.is_same():
            return True
        if not self.is_same():
            return False
        self._glance = _Glance.at(self._held)
        return True

    def put_back(self) -> None:
        """Undo what was written since, but for the numbers in tensors."""
        for value, held in self._held:
            if _is_same(held, _held(value)):
                continue
            if isinstance(held, dict):
                _put_names_back(value, held)
            elif isinstance(value, list):
                value[:] = held
            elif isinstance(held, bytes):
                value[...] = np.frombuffer(held, value.dtype).reshape(value.shape)
            elif isinstance(value, deque | set):
                value.clear()
                (value.extend if isinstance(value, deque) else value.update)(held)


_LEVELS = [0]


def _enter(of_torch: Callable[[], int]) -> int:
    """Enter a level of forward derivatives, and count it."""
    _LEVELS[0] += 1
    return of_torch()


COUNTING = Replaced(forward_ad, "enter_dual_level", _enter)
"""Within this context, `outside_of` sees that a thread enters a level of forward derivatives."""


def outside_of(owner: nn.Module, *functions: Any) -> Reached:
    """Return what the code of the owner's modules, and functions, reach outside of these modules.

    Entering a level of forward derivatives counts as writing there.
    """
    parts = [*owner.modules()]
    roots: list[Any] = [_LEVELS, *functions]
    for part in parts:
        roots += [type(part), *filter(callable, vars(part).values()), *own_hooks(part)]
    return Reached(*roots, without=parts)


def _held(value: Any) -> Held | None:
    """Return what a value holds, by name or in order; of a tensor its version; None: nothing."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else _state_of(value)
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return value.tobytes()
    # By Python's own methods: a subclass may make something at each look (as in transformers).
    if isinstance(value, dict):
        return dict(dict.items(value))
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return list(kind.__iter__(value))
    if isinstance(value, types.CellType):
        return {} if value == types.CellType() else {"cell_contents": value.cell_contents}
    if isinstance(value, types.FunctionType) and _is_theirs(value):
        return dict(_globals_read(value))
    if isinstance(value, type) and _is_theirs(value):
        # Python's own: of `copy.deepcopy`, of annotations, and of abstract classes.
        unread = "__slotnames__", "__annotations__", "_abc_impl"
        return {name: held for name, held in vars(value).items() if name not in unread}
    if _is_theirs(type(value)):
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = sorted({name for own in slots for name in ([own] if isinstance(own, str) else own)})
        return {name: getattr(value, name) for name in names if hasattr(value, name)} or None
    return None


def _state_of(tensor: Tensor) -> int:
    """Return a number that is another one after a write, or after `requires_grad_`."""
    return 2 * tensor._version + tensor.requires_grad


class _Glance(NamedTuple):
    """Sees whether every name leads to the object that it led to. It looks at nothing else.

    Attributes:
        empty: Containers that were empty.
        tensors, versions: Tensors, and the `_state_of` each.
        arrays: Arrays of numpy, and their numbers.
        dicts, lengths, keys, values: Dictionaries, and what all of them held.
        others: Functions that list the objects that others hold, and these objects.
    """

    empty: list[Any]
    tensors: list[Tensor]
    versions: list[int]
    arrays: list[tuple[Any, bytes]]
    dicts: list[dict[Any, Any]]
    lengths: list[int]
    keys: list[Any]
    values: list[Any]
    others: list[tuple[Callable[[], Iterable[Any]], list[Any]]]

    @classmethod
    def at(cls, held: list[tuple[Any, Any]]) -> Self:
        """Take a glance at values, and what they hold."""
        empty = [v for v, _ in held if isinstance(v, dict | list | set | deque) and not v]
        tensors = [v for v, _ in held if isinstance(v, Tensor) and not v.is_inference()]
        arrays = [(v, of) for v, of in held if isinstance(of, bytes)]
        dicts = [v for v, _ in held if isinstance(v, dict) and v]
        seen = {id(v) for v in (*empty, *tensors, *dicts, *(array for array, _ in arrays))}
        looks = [_look(v, of) for v, of in held if id(v) not in seen]
        return cls(
            empty, tensors, [*map(_state_of, tensors)], arrays,
            dicts, [*map(len, dicts)], [*chain.from_iterable(dicts)],
            [*chain.from_iterable(map(dict.values, dicts))],
            [(look, [*look()]) for look in looks if look is not None],
        )  # fmt: skip

    def is_same(self) -> bool:
        """Return whether nothing differs at a glance. It runs in each call of compiled code."""
        dicts = self.dicts
        return (
            not any(self.empty)
            and [*map(_state_of, self.tensors)] == self.versions
            and [*map(len, dicts)] == self.lengths
            and all(map(is_, chain.from_iterable(dicts), self.keys))
            and all(map(is_, chain.from_iterable(map(dict.values, dicts)), self.values))
            and all(array.tobytes() == held for array, held in self.arrays)
            and all(_are_same(look(), before) for look, before in self.others)
        )


def _are_same(now: Iterable[Any], before: list[Any]) -> bool:
    found = [*now]
    return len(found) == len(before) and all(map(is_, found, before))


def _look(value: Any, held: Any) -> Callable[[], Iterable[Any]] | None:
    """Return what lists the objects that a value holds; None if it can hold no others."""
    if isinstance(value, tuple | frozenset | Tensor):
        return None
    if isinstance(value, types.FunctionType):
        return lambda: (found for _, found in _globals_read(value))
    if isinstance(value, list | set | deque):
        return lambda: value
    return lambda: _held(value).values()  # type: ignore[union-attr]


def _leads_to(value: Any) -> Iterator[Any]:
    """Yield what a value leads to, besides what it holds."""
    if isinstance(value, types.FunctionType):
        if _is_theirs(value):
            yield from (value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value))
    elif isinstance(value, type):
        yield from value.__bases__
    elif isinstance(
        value, types.MethodType | types.BuiltinFunctionType | staticmethod | classmethod
    ):
        yield from (getattr(value, name, None) for name in ("__func__", "__self__"))
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, functools.cached_property):  # it has a lock of its own
        yield value.func
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif hasattr(value, "__dict__") and (
        isinstance(value, nn.Module)
        or HOLDERS.match(type(value).__module__)
        or _is_theirs(type(value))
    ):
        yield from (type(value), vars(value))


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, int | bytes):
        return bool(before == now)
    if len(before) != len(now):
        return False
    if isinstance(before, dict):
        if before.keys() != now.keys():
            return False
        before, now = before.values(), [now[name] for name in before]
    pairs = zip(before, now, strict=True)
    return all(a is b or (type(a) is type(b) in (int, float) and a == b) for a, b in pairs)


def _put_names_back(value: Any, held: dict[Any, Any]) -> None:
    of_dict = value.__globals__ if isinstance(value, types.FunctionType) else value
    is_dict, now = isinstance(of_dict, dict), _held(value)
    assert isinstance(now, dict)
    if is_dict and of_dict is not value:  # names with a dot are of modules
        for name in [name for name in held if "." in name]:
            module, _, attribute = name.rpartition(".")
            if now.get(name) is not held[name]:
                setattr(held.get(module, sys.modules.get(module)), attribute, held[name])
        held, now = ({n: v for n, v in of.items() if "." not in n} for of in (held, now))
    for name in now.keys() - held.keys():
        of_dict.__delitem__(name) if is_dict else delattr(value, name)
    for name, before in held.items():
        if name not in now or now[name] is not before:
            of_dict.__setitem__(name, before) if is_dict else setattr(value, name, before)


_CONSTANTS = (
    *(int, float, complex, str, bytes, type(None), type(...), slice, range, np.generic, np.dtype),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.CodeType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, logging.Logger),
)


def _is_constant(value: Any) -> bool:
    """Return whether a value of libraries holds no number that may change."""
    kind = type(value)
    is_ours = (kind.__module__ or "").partition(".")[0] in ("maml", "datasets")
    if isinstance(value, types.ModuleType):
        return not _is_theirs(value)
    return isinstance(value, _CONSTANTS) or hasattr(kind, "__get__") or is_ours


def _can_be_copied(value: Any) -> bool:
    """Return whether a value is a constant, or an object whose state can be read."""
    kind = type(value)
    if isinstance(value, types.ModuleType | type) or hasattr(kind, "__get__"):
        return True
    if kind in copyreg.dispatch_table or hasattr(kind, "__deepcopy__"):
        return True
    try:
        return value.__reduce_ex__(4) is not None
    except Exception:
        return False


@functools.cache
def globals_of(code: types.CodeType, by: str | tuple[str, ...] = OF_GLOBALS) -> set[str]:
    """Return the names of globals that code, and the functions inside it, look up.

    ``by``: the ends of the names of instructions, if it is not globals that are asked for.
    """
    found = {i.argval for i in dis.get_instructions(code) if i.opname.endswith(by)}
    inside = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return found.union(*(globals_of(inner, by) for inner in inside))


def _globals_read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function looks up, and attributes of modules among them, and of
    modules that it imports itself.
    """
    code, of_globals, seen = function.__code__, function.__globals__, set[str]()
    for name in sorted(globals_of(code) & of_globals.keys()):
        yield name, of_globals[name]
        yield from _read_of(name, of_globals[name], _names(code), seen)
    if imported := globals_of(code, "IMPORT_NAME"):
        # What is imported may be of the function's own package.
        paths = [name.split(".") for name in (*imported, of_globals.get("__package__") or "")]
        names = _names(code).union(*paths)
        for root in sorted({path[0] for path in paths}):
            yield from _read_of(root, sys.modules.get(root), names, seen)


def _read_of(path: str, value: Any, names: set[str], seen: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a user's module that code names, and those of modules among them.

    Modules may lead to each other, so each is ``seen`` once.
    """
    if not isinstance(value, types.ModuleType) or not _is_theirs(value) or value.__name__ in seen:
        return
    seen.add(value.__name__)
    own = vars(value)
    for key in sorted(names & own.keys()):
        yield f"{path}.{key}", own[key]
        yield from _read_of(f"{path}.{key}", own[key], names, seen)


@functools.cache
def _names(code: types.CodeType) -> set[str]:
    """Return the names of attributes and globals in code, and in the functions inside it."""
    inside = (inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    return set(code.co_names).union(*map(_names, inside))


def _is_theirs(value: Any) -> bool:
    """Return whether a function, a class or a module is none of the libraries'."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").partition(".")[0] not in LIBRARIES
