"""Read pickles of numpy arrays and plain containers without running anything inside them.

A pickle may name any function and call it. This reader has stand-ins for the few names that numpy
writes for an array, and refuses all other names. It checks dtype and size before numpy's own code
gets the data, because a damaged state can crash that code.
"""

import math
import pickle
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from datasets.errors import DataError
from datasets.words import reason


class _Array:
    """A stand-in for a pickled array; ``values`` is None until the state is read."""

    __slots__ = ("values",)

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, by_column, data = state
        data = data.encode("latin-1") if isinstance(data, str) else data  # bytes of Python 2
        if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, bytearray)):
            raise ValueError("an array without a dtype or contents")
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"an array of the shape {shape}")
        of_numbers = np.dtype(dtype.order + dtype.code)
        if math.prod(shape) * of_numbers.itemsize != len(data):
            raise ValueError(f"an array of the shape {shape} in {len(data)} bytes")
        order: Literal["C", "F"] = "F" if by_column else "C"
        self.values = np.frombuffer(bytes(data), of_numbers).reshape(shape, order=order)


class _Dtype:
    """A stand-in for a dtype of booleans or numbers; it refuses others, such as Python objects."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_options: Any) -> None:
        self.code, self.order = str(code), "="
        if self.code[:1] not in tuple("biuf") or self.code[1:] not in ("1", "2", "4", "8"):
            raise ValueError(f"arrays of {self.code!r} are not read")

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, …). Only dtypes that are refused use the rest.
        self.order = state[1]
        if self.order not in ("|", "<", ">", "="):
            raise ValueError(f"the byte order {self.order!r} is not known")


_NAMES: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    # How Python 3 writes bytes for Python 2.
    ("_codecs", "encode"): lambda text, _encoding=None: text.encode("latin-1"),
    # How Python 3 writes empty bytes for Python 2. The stand-in accepts no arguments.
    ("__builtin__", "bytes"): lambda: b"",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {f'{module}.{name}'!a}")
        # A new function each time: a pickle can set its attributes; the next must not see them.
        return lambda *arguments: _NAMES[module, name](*arguments)


def read(path: Path) -> Any:
    """Return plain values, containers and inputs of :func:`array`, or raise :class:`DataError`."""
    try:
        with open(path, "rb") as file:
            return _Unpickler(file, encoding="latin-1").load()  # the strings of Python 2
    # Damaged or hostile bytes raise errors of every kind, here or in Python's unpickler.
    except Exception as error:
        raise DataError(
            f"{path}: not a pickle of arrays and plain values ({reason(error)}); nothing in it was "
            "run; fetch it again from where you trust it"
        ) from error


def array(value: Any) -> NDArray[Any]:
    """Convert :func:`read`'s array (read-only) or integer list; ``ValueError`` for other values."""
    if isinstance(value, _Array) and value.values is not None:
        return value.values
    # No nested lists: a hostile pickle can make them expand without limit.
    if not isinstance(value, list) or not all(type(row) is int for row in value):
        raise ValueError(f"{type(value).__name__} in place of an array")
    return np.array(value)
