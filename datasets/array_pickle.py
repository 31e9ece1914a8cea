"""Pickles of numpy arrays and plain containers, read without running anything that is in them.

A pickle may name any function and have it called. This reader knows stand-ins for the few names
that numpy writes for an array, and refuses all others. Numpy's own code sees nothing before dtype
and size were checked: damaged states can crash it.
"""

import math
import pickle
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from datasets.errors import DataError


class _Array:
    """What a pickle says of an array; empty until its state was read."""

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
    """A dtype of booleans or numbers; all others, as of Python objects, are refused."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_options: Any) -> None:
        self.code, self.order = _text(code), "="
        if self.code[:1] not in tuple("biuf") or self.code[1:] not in ("1", "2", "4", "8"):
            raise ValueError(f"arrays of {self.code!r} are not read")

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, …); what follows belongs to dtypes that are refused.
        self.order = _text(state[1])
        if self.order not in ("|", "<", ">", "="):
            raise ValueError(f"the byte order {self.order!r} is not known")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


_NAMES: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    # How Python 3 writes bytes for Python 2.
    ("_codecs", "encode"): lambda text, _encoding=None: text.encode("latin-1"),
    # Bytes of length zero, whatever the version; nothing can be passed.
    ("__builtin__", "bytes"): lambda: b"",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!a}")
        # Another function each time: nothing that a pickle sets of one is there for the next.
        return lambda *arguments: _NAMES[module, name](*arguments)


def read(path: Path) -> Any:
    """Plain values and containers, and what :func:`array` makes arrays; or :class:`DataError`.

    The keys of dictionaries, which Python 2 wrote as bytes, are texts on the first two levels.
    """
    try:
        with open(path, "rb") as file:
            return _named(_Unpickler(file, encoding="bytes").load(), 2)
    # Damaged and hostile bytes raise errors of every kind, here or in Python's pickle machine.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path}: not a pickle of arrays and plain values ({reason}); nothing in it was run; "
            "fetch it again from where you trust it"
        ) from error


def _named(found: Any, levels: int) -> Any:
    if not levels or not isinstance(found, dict):
        return found
    return {_text(key): _named(value, levels - 1) for key, value in found.items()}


def array(found: Any) -> NDArray[Any]:
    """An array that :func:`read` has found, read-only, or a list of integers; or ``ValueError``."""
    if isinstance(found, _Array) and found.values is not None:
        return found.values
    # A list of lists can be made to grow without end.
    if not isinstance(found, list) or not all(type(row) is int for row in found):
        raise ValueError(f"{type(found).__name__} in place of an array")
    return np.array(found)
