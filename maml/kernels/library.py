"""Compile ``convnet.cpp`` on first use, into a cache that processes and runs share.

The compiler is ``$CXX``, else g++ or clang++. Where there is none, or it fails, `load` returns None
and the caller computes with torch. The cache is ``$MAML_CACHE``, else ``~/.cache/maml``, in
``kernels/``; a file's name is a hash of all that determines it, the compiler's version and the
processor included.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import filelock

from datasets.cache import cache_root

SOURCE = Path(__file__).with_name("convnet.cpp")
# No -ffast-math: a loss that diverged must stay NaN.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC",
)  # fmt: skip
SUFFIXES = ("f32", "f64")

_failures: list[str] = []


def failure() -> str:
    """Return why `load` returned None."""
    return _failures[-1] if _failures else "unknown reason"


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled library, or None where it cannot be had."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _failures.append("no C++ compiler ($CXX, g++ or clang++)")
        return None
    folder = cache_root() / "kernels"
    try:
        path = folder / f"convnet-{_identity(compiler)}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{path}.lock"):
                if not path.exists():
                    _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        _failures.append(str(error))
        return None
    except subprocess.CalledProcessError as error:
        _failures.append(f"{compiler}: {error.stderr.strip()[:200] or 'failed'}")
        return None
    return _declare(library)


def lanes(element_size: int) -> int | None:
    """Return how many elements of ``element_size`` bytes a vector holds; None without kernels."""
    library = load()
    return None if library is None else int(library.lanes(element_size))


def _compile(compiler: str, path: Path) -> None:
    # Renamed when whole: a process that loads at the same time sees all of it or nothing.
    building = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(building)],
            check=True,
            capture_output=True,
            text=True,
        )
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def _identity(compiler: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    flags = ""
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True
    ).stdout
    parts = (SOURCE.read_text(), *FLAGS, compiler, version, platform.platform(), flags)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.plan_new.restype = ctypes.c_void_p
    library.plan_new.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_double,
    ]  # fmt: skip
    for suffix in SUFFIXES:
        # Attributes are kept; library[name] is a function object anew each time.
        getattr(library, f"residual_size_{suffix}").restype = ctypes.c_int64
        for name in ("gradient", "hessian_vector", "outputs"):
            function = getattr(library, f"{name}_{suffix}")
            function.restype, function.errcheck = ctypes.c_int, _check
    return library


def _check(failed: int, *_: object) -> int:
    if failed:
        raise MemoryError("no memory for the working buffers of the compiled kernels")
    return failed
