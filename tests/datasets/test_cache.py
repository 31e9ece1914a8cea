"""A cached array is whole or absent, even if its builder is killed or fails."""

import io
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from datasets import DataError, cache
from datasets.cache import cached
from datasets.paths import cache_root, default_data_root
from datasets.whole import seal
from tests.launching import run, run_together

SHAPE = (6, 4)
VALUES = np.arange(24, dtype=np.uint8).reshape(SHAPE)

CHILD = """
import os, signal, sys, time
import numpy as np
from datasets.cache import cached

def build():
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    for row in np.arange(24, dtype=np.uint8).reshape(6, 4):
        time.sleep(0.05)
        yield row[None]

print(cached("x/a.npy", (6, 4), build, "drawing lines").sum())
"""


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def chunks():
    yield VALUES[:4]
    yield VALUES[4:]


def test_built_once_then_mapped(empty_cache, capfd):
    first = cached("x/a.npy", SHAPE, chunks, "drawing lines (train)")
    said = f"drawing lines (train), once: {empty_cache}/x/a.npy keeps it\n"
    assert isinstance(first, np.memmap) and not first.flags.writeable
    assert (first == VALUES).all()
    again = cached("x/a.npy", SHAPE, lambda: pytest.fail("built again"), "drawing")
    assert (again == VALUES).all() and capfd.readouterr().err == said
    # An ordinary .npy file, for anyone who wants to carry it elsewhere.
    assert (np.load(empty_cache / "x" / "a.npy") == VALUES).all()
    assert leftovers(empty_cache) == ["a.npy"]


def test_processes_that_start_together_build_once(empty_cache, tmp_path):
    log = tmp_path / "builds"
    for done in run_together([[sys.executable, "-c", CHILD, str(log)]] * 3, 120):
        assert done.stdout.strip() == str(VALUES.sum())
    assert log.read_text() == "built\n"
    assert leftovers(empty_cache) == ["a.npy"]


def test_a_killed_builder_leaves_nothing_that_anyone_uses(empty_cache, tmp_path):
    die = CHILD.replace("time.sleep(0.05)", "row[0] == 12 and os.kill(os.getpid(), signal.SIGKILL)")
    run([sys.executable, "-c", die, str(tmp_path / "builds")], 120, expect=-signal.SIGKILL)
    assert not (empty_cache / "x" / "a.npy").exists()
    assert len(leftovers(empty_cache)) == 1, "the kill should have come in the middle of the build"
    assert (cached("x/a.npy", SHAPE, chunks, "drawing") == VALUES).all()
    assert leftovers(empty_cache) == ["a.npy"]


def test_what_cannot_be_written_is_one_line(empty_cache, monkeypatch):
    """First the system refuses to write more; then the cache folder is a file."""
    code = """
import resource
import numpy as np
from datasets.cache import DataError, cached
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
ones = np.ones((64, 1 << 14), np.uint8)
try:
    cached("x/big.npy", ones.shape, lambda: ones, "drawing ones")
except DataError as error:
    print(error)
"""
    out = run([sys.executable, "-c", code], 120).stdout
    assert out.count("\n") == 1
    assert "big.npy" in out and "$MAML_CACHE" in out and "too large" in out
    assert leftovers(empty_cache) == []
    monkeypatch.setenv("MAML_CACHE", __file__)
    with pytest.raises(DataError, match=r"a\.npy: cannot write the cache .*\$MAML_CACHE"):
        cached("x/a.npy", SHAPE, chunks, "drawing")


DAMAGES = {
    "empty": (lambda whole: b"", "empty"),
    "another array, sealed": (lambda whole: seal(npy(VALUES.T)), r"holds uint8 \[4, 6\]"),
    "another type, sealed": (lambda whole: seal(npy(VALUES.astype(np.int8))), "holds int8"),
    "written before there were digests": (lambda whole: npy(VALUES), "by an earlier version"),
    "one byte of the array": (lambda whole: whole[:140] + b"\xff" + whole[141:], "is damaged"),
}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_damaged_file_is_built_anew_and_said_so(empty_cache, capfd, monkeypatch):
    """No flipped bit and no cut is overlooked."""
    monkeypatch.setattr("datasets.whole.BLOCK", 50)
    path = empty_cache / "x" / "a.npy"
    cached("x/a.npy", SHAPE, chunks, "drawing")
    whole = path.read_bytes()
    capfd.readouterr()
    damages = [(spoil(whole), reason) for spoil, reason in DAMAGES.values()]
    damages += [(whole[:size], "it") for size in range(1, len(whole), 7)]
    for bit in np.random.default_rng(2).choice(8 * len(whole), 50, replace=False):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append((flipped, "it"))
    for damaged, reason in damages:
        path.write_bytes(damaged)
        cache._checked.clear()  # a clock may be too coarse to tell the two files apart
        assert (cached("x/a.npy", SHAPE, chunks, "drawing") == VALUES).all()
        assert path.read_bytes() == whole
        line, _ = capfd.readouterr().err.splitlines()
        assert re.fullmatch(rf"{path}: .*({reason}).*; it is built anew", line)


def broken():
    yield VALUES[:2]
    raise ValueError("a.npy: damaged")


def test_a_wrong_build_never_enters_the_cache(empty_cache):
    for wrong in (VALUES[:4], np.tile(VALUES, 2), VALUES.astype(np.float32), None):
        with pytest.raises(ValueError, match=r"a\.npy"):
            build = broken if wrong is None else lambda: iter([wrong])  # noqa: B023
            cached("x/a.npy", SHAPE, build, "drawing")
        assert leftovers(empty_cache) == []


def test_folders_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, folder in (("MAML_CACHE", cache_root), ("MAML_DATA", default_data_root)):
        monkeypatch.delenv(variable, raising=False)
        assert folder() == tmp_path / ".cache" / "maml"
        monkeypatch.setenv(variable, "~/elsewhere")
        assert folder() == tmp_path / "elsewhere"
