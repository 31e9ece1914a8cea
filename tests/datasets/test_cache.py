"""A cached array is whole or absent, whoever builds it and however that ends."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from datasets import DataError, cache
from datasets.cache import cached
from datasets.paths import cache_root, default_data_root

SHAPE = (6, 4)
VALUES = np.arange(24, dtype=np.uint8).reshape(SHAPE)

CHILD = """
import os, signal, sys, time
import numpy as np
from datasets import DataError, cache
from datasets.cache import cached

def build():
    with open(os.environ["BUILDS"], "a") as log:
        log.write("built\\n")
    for row in np.arange(24, dtype=np.uint8).reshape(6, 4):
        time.sleep(0.05)
        yield row[None]

print(cached("x/a.npy", (6, 4), build).sum())
"""


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def chunks():
    yield VALUES[:4]
    yield VALUES[4:]


def test_built_once_then_mapped(empty_cache):
    first = cached("x/a.npy", SHAPE, chunks)
    assert isinstance(first, np.memmap) and not first.flags.writeable
    assert (first == VALUES).all()
    assert (cached("x/a.npy", SHAPE, lambda: pytest.fail("built again")) == VALUES).all()
    # An ordinary .npy file, for anyone who wants to carry it elsewhere.
    assert (np.load(empty_cache / "x" / "a.npy") == VALUES).all()
    assert leftovers(empty_cache) == ["a.npy"]


def test_who_builds_says_so_once(empty_cache, capfd):
    for _ in range(2):
        cached("x/a.npy", SHAPE, chunks, title="drawing lines (train)")
    said = f"drawing lines (train), once: {empty_cache}/x/a.npy keeps it\n"
    assert capfd.readouterr().err == said


def test_a_terminal_shows_how_far_a_build_is(empty_cache, capfd, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    ticks = iter(range(0, 10**6, 10))
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(ticks)))
    cached("x/a.npy", SHAPE, chunks, title="drawing lines (train)")
    said = capfd.readouterr().err
    assert "4/6" in said and "6/6" in said


def test_a_log_has_a_line_now_and_then(empty_cache, capfd, monkeypatch):
    monkeypatch.setattr(cache, "REPORT_S", 0.0)
    cached("x/a.npy", SHAPE, chunks, title="drawing lines (train)")
    assert capfd.readouterr().err.splitlines()[1:] == [
        "drawing lines (train): 4 of 6",
        "drawing lines (train): 6 of 6",
    ]


SLOW = """
import os, sys, time
import numpy as np
from datasets.cache import cached

def build():
    for _ in range(int(sys.argv[1])):
        yield np.ones((1, 1 << 16), np.uint8)
        time.sleep(0.1)
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
    for _ in range(40):
        yield np.ones((1, 1 << 16), np.uint8)
        time.sleep(0.1)

cached("x/slow.npy", (int(sys.argv[1]) + 40, 1 << 16), build)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_who_waits_gives_up_only_on_a_builder_that_hangs(
    empty_cache, run_python, monkeypatch, hangs
):
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 2.0)
    code = f"import sys; sys.argv[1:] = ['1', '{600 if hangs else 0}']\n{SLOW}"
    child = run_python(code)
    try:
        assert child.stdout is not None and child.stdout.readline() == "begun\n"

        def wait():
            return cached("x/slow.npy", (41, 1 << 16), lambda: pytest.fail("built twice"))

        if hangs:
            with pytest.raises(DataError, match=r"slow\.npy\.lock.*nothing for 2 s"):
                wait()
        else:
            assert wait().all()
    finally:
        child.kill()
        child.communicate()


def test_processes_that_start_together_build_once(empty_cache, run_python, tmp_path):
    log = tmp_path / "builds"
    children = [run_python(CHILD, BUILDS=str(log)) for _ in range(4)]
    for child in children:
        out, err = child.communicate(timeout=600)
        assert child.returncode == 0, err
        assert out.strip() == str(VALUES.sum())
    assert log.read_text() == "built\n"
    assert leftovers(empty_cache) == ["a.npy"]


def test_a_killed_builder_leaves_nothing_that_anyone_uses(empty_cache, run_python, tmp_path):
    die = CHILD.replace("time.sleep(0.05)", "row[0] == 12 and os.kill(os.getpid(), signal.SIGKILL)")
    child = run_python(die, BUILDS=str(tmp_path / "builds"))
    child.communicate(timeout=600)
    assert child.returncode == -signal.SIGKILL
    assert not (empty_cache / "x" / "a.npy").exists()
    assert len(leftovers(empty_cache)) == 1, "the kill should have come in the middle of the build"
    assert (cached("x/a.npy", SHAPE, chunks) == VALUES).all()
    assert leftovers(empty_cache) == ["a.npy"]


def test_a_real_refusal_of_the_system_to_write_more_is_one_line(empty_cache, run_python):
    code = """
import resource
import numpy as np
from datasets import DataError, cache
from datasets.cache import cached
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    cached("x/big.npy", (64, 1 << 14), lambda: (np.ones((1, 1 << 14), np.uint8) for _ in range(64)))
except DataError as error:
    print(error)
"""
    out, err = run_python(code).communicate(timeout=600)
    assert out.count("\n") == 1, err
    assert "big.npy" in out and "$MAML_CACHE" in out and "too large" in out
    assert leftovers(empty_cache) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(empty_cache, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError) as caught:
        cached("x/a.npy", SHAPE, chunks)
    message = str(caught.value)
    assert "a.npy" in message and "No space left on device" in message and "$MAML_CACHE" in message
    assert leftovers(empty_cache) == []
    # Once there is room again, the same call succeeds.
    monkeypatch.undo()
    monkeypatch.setenv("MAML_CACHE", str(empty_cache))
    assert (cached("x/a.npy", SHAPE, chunks) == VALUES).all()


def test_a_cache_that_cannot_be_a_folder_is_named(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("MAML_CACHE", str(file))
    with pytest.raises(DataError, match=r"\$MAML_CACHE"):
        cached("x/a.npy", SHAPE, chunks)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "other shape", "other type"])
def test_a_damaged_file_is_built_anew(empty_cache, damage):
    path = empty_cache / "x" / "a.npy"
    cached("x/a.npy", SHAPE, chunks)
    whole = path.read_bytes()
    if damage == "other shape":
        np.save(path, VALUES.T)
    elif damage == "other type":
        np.save(path, VALUES.astype(np.int8))
    else:
        path.write_bytes({"truncated": whole[:-5], "empty": b"", "text": b"hello" * 40}[damage])
    assert (cached("x/a.npy", SHAPE, chunks) == VALUES).all()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: iter([VALUES[:4]]),
        lambda: iter([VALUES, VALUES[:1]]),
        lambda: iter([VALUES.astype(np.float32)]),
        lambda: iter([VALUES[:, :3]]),
    ],
)
def test_a_wrong_build_never_enters_the_cache(empty_cache, wrong):
    with pytest.raises(ValueError, match=r"a\.npy"):
        cached("x/a.npy", SHAPE, wrong)
    assert leftovers(empty_cache) == []


def test_an_error_of_the_build_passes_through_and_leaves_nothing(empty_cache):
    def broken():
        yield VALUES[:2]
        raise DataError("archive.zip: damaged")

    with pytest.raises(DataError, match=r"^archive\.zip: damaged$"):
        cached("x/a.npy", SHAPE, broken)
    assert leftovers(empty_cache) == []


def test_folders_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, folder in (("MAML_CACHE", cache_root), ("MAML_DATA", default_data_root)):
        monkeypatch.delenv(variable, raising=False)
        assert folder() == tmp_path / ".cache" / "maml"
        monkeypatch.setenv(variable, "~/elsewhere")
        assert folder() == tmp_path / "elsewhere"
