"""Pickles of numpy arrays and plain containers, read without running anything that is in them.

A pickle may name any function and have it called. This reader knows stand-ins for the few names
that numpy writes for an array, and refuses all others. Not even numpy's own code sees what the file
says of an array, before dtype and size were checked: damaged states can crash it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from datasets.errors import DataError

# What damaged or hostile bytes raise, here or in Python's pickle machine.
_UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


class PickledArray:
    """An array in a pickle; ``np.asarray`` gives it, read-only.

    Empty until its state was read.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        """It gets its contents from :meth:`__setstate__`."""
        self._values: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        """Numpy's (version, shape, dtype, whether columns come first, bytes)."""
        _version, shape, dtype, by_column, data = state
        self._values = _array(data, dtype, shape, "F" if by_column else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Numpy's protocol. Raises ``ValueError`` if the pickle never said what is in it."""
        if self._values is None:
            raise ValueError("an array without contents")
        return self._values if dtype is None else self._values.astype(dtype)


class _Dtype:
    """A dtype of booleans or numbers; others, such as those of Python objects, are refused."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *_options: Any) -> None:
        self._code, self._order = _text(code), "="
        kind, size = self._code[:1], self._code[1:]
        if kind not in "biuf" or size not in ("1", "2", "4", "8"):
            raise ValueError(f"arrays of {self._code!r} are not read")

    def __setstate__(self, state: Any) -> None:
        """Numpy's (version, byte order, …); what follows belongs to dtypes that are refused."""
        self._order = _text(state[1])
        if self._order not in ("|", "<", ">", "="):
            raise ValueError(f"the byte order {self._order!r} is not known")

    def dtype(self) -> np.dtype[Any]:
        """The same for numpy."""
        return np.dtype(self._order + self._code)


class _Name:
    """What a permitted name means; nothing in a pickle can change it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a function")

    def __call__(self, *arguments: Any) -> Any:
        return object.__getattribute__(self, "_make")(*arguments)


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype):
        raise ValueError("an array without a dtype")
    if isinstance(data, str):  # bytes of Python 2
        data = data.encode("latin-1")
    if not isinstance(data, (bytes, bytearray)) or not isinstance(shape, tuple):
        raise ValueError("an array without contents or shape")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"an array of the shape {shape}")
    of_numbers = dtype.dtype()
    if math.prod(shape) * of_numbers.itemsize != len(data):
        raise ValueError(f"an array of the shape {shape} in {len(data)} bytes")
    values = np.frombuffer(data, of_numbers).reshape(shape, order="F" if order == "F" else "C")
    values.flags.writeable = False
    return values


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *_axes: Any) -> PickledArray:
    found = PickledArray()
    found.__setstate__((1, shape, dtype, order == "F", data))
    return found


def _scalar(dtype: Any, data: Any) -> Any:
    return _array(data, dtype, (), "C").item()


def _encode(text: Any, encoding: Any = "latin-1") -> bytes:
    # How Python 3 writes bytes for Python 2.
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in {encoding!r}")
    return text.encode("latin-1")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a text is expected")
    return value


_NAMES: Final = {
    ("numpy", "ndarray"): _Name(lambda *_: PickledArray()),
    ("numpy", "dtype"): _Name(_Dtype),
    **{
        (f"numpy.{core}.{module}", name): _Name(make)
        for core in ("core", "_core")
        for module, name, make in (
            ("multiarray", "_reconstruct", lambda *_: PickledArray()),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
    ("_codecs", "encode"): _Name(_encode),
    # Bytes of length zero, whatever the version; nothing can be passed.
    ("__builtin__", "bytes"): _Name(lambda: b""),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!a}")
        return _NAMES[module, name]


def read(path: Path) -> Any:
    """What a pickle holds: plain values and containers, and arrays as :class:`PickledArray`.

    Texts of Python 2 are bytes. Raises :class:`DataError`, in one line that names the file, if it
    cannot be read, or asks for anything but arrays of numbers.
    """
    try:
        with open(path, "rb") as file:
            return _Unpickler(file, encoding="bytes").load()
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path}: not a pickle of arrays and plain values ({reason}); nothing in it was run; "
            "fetch it again from where you trust it"
        ) from error
