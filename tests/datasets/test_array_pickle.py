"""Pickles of arrays are read as numpy wrote them; a pickle creates and runs nothing else."""

import contextlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import DataError, array_pickle
from tests.runs import refused

ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3)),
    np.array([True, False]),
    np.zeros((0, 3), dtype=np.int64),
    np.array(7, dtype=np.int16),
]


def write(folder: Path, content: bytes) -> Path:
    path = folder / "some.pkl"
    path.write_bytes(content)
    return path


def not_read(folder: Path, content: bytes) -> str:
    message = refused(array_pickle.read, write(folder, content))
    assert message.startswith(f"{folder / 'some.pkl'}: not a pickle of ")
    return message


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("core", [b"numpy.core.", b"numpy._core."])
def test_arrays_are_those_that_were_written(tmp_path: Path, protocol: int, core: bytes) -> None:
    content = {"arrays": ARRAYS, "plain": [1, 2.5, None, ("a", b"b\xff")]}
    written = pickle.dumps(content, protocol)
    if protocol < 4:  # later protocols have the length before the name
        written = written.replace(b"numpy._core.", b"numpy.core.").replace(b"numpy.core.", core)
    found = array_pickle.read(write(tmp_path, written))
    assert found["plain"] == content["plain"]
    for expected, some in zip(ARRAYS, found["arrays"], strict=True):
        values = array_pickle.array(some)
        assert values.dtype == expected.dtype and values.shape == expected.shape
        assert (values == expected).all() and not values.flags.writeable


def test_arrays_of_python_2(tmp_path: Path) -> None:
    """Written by Python 2.7 with numpy 1.16, ``pickle.dump(…, protocol=2)``: texts are bytes."""
    written = (
        b"\x80\x02}q\x01U\nimage_dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\n"
        b"ndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x03\x85cnumpy\ndtype\nq\x06U\x02u1K\x00"
        b"K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x01"
        b"\x80\xfftbs."
    )
    found = array_pickle.read(write(tmp_path, written))
    values = array_pickle.array(found["image_data"])
    assert list(found) == ["image_data"] and values.tolist() == [1, 128, 255]


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    for function, arguments in (
        (exec, (f"open({str(mark)!r}, 'w')",)),
        (getattr, ("", "join")),
        (np.memmap, (str(mark), "u1", "w+", 0, (4,))),
    ):
        content = pickle.dumps({"image_data": Hostile(function, *arguments)}, protocol)
        message = not_read(tmp_path, content)
        assert f"{function.__name__}'" in message.split("it names '")[1]
        assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "the pickle is not hostile at all"


# Numpy itself would accept these arrays, and could crash.
DTYPE = (
    b"cnumpy\ndtype\n(U\x02%sK\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
ARRAY = (
    b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(%st%s\x89%stb."
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Ran out of input"),
        (b"hello", ""),
        (np.array([1], dtype=object).dumps(), "'O8'"),
        (np.array(["a"]).dumps(), "'U1'"),
        (np.zeros(2, dtype=[("a", "u1")]).dumps(), "'V1'"),
        (ARRAY % (b"K\x09", DTYPE % b"u1", b"U\x01a"), "shape (9,) in 1 bytes"),
        (ARRAY % (b"J\xff\xff\xff\xff", DTYPE % b"u1", b"U\x01a"), "shape (-1,)"),
        (ARRAY % (b"K\x01", b"N", b"U\x01a"), "without a dtype"),
        (ARRAY % (b"K\x01", DTYPE % b"u1", b"]"), "or contents"),
    ],
)
def test_what_is_not_an_array_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in not_read(tmp_path, content)


def test_nothing_in_a_pickle_changes_how_the_next_is_read(tmp_path: Path) -> None:
    for attempt in (b"}U\x08__call__K\x01sb.", b"(N}U\x0d__kwdefaults__Nstb."):
        with contextlib.suppress(DataError):
            array_pickle.read(write(tmp_path, b"cnumpy\ndtype\n" + attempt))
    found = array_pickle.array(array_pickle.read(write(tmp_path, ARRAYS[0].dumps())))
    assert (found == ARRAYS[0]).all()
