"""Compile ``src/convnet.cpp`` on first use, into a cache that processes and runs share.

The compiler is ``$CXX``, else g++ or clang++. If no compiler exists or it fails, `load` returns
None and the caller computes with torch. A cached file ends in its digest; a damaged file is never
loaded but compiled again. The cache is ``kernels/`` in ``$MAML_CACHE``, else in ``~/.cache/maml``.
A file's name is a hash of the sources, the options, the compiler with its version, the platform and
the processor. ``$MAML_KERNEL_FLAGS`` adds options of the compiler (`launch/sanitize`).
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from datasets import whole
from datasets.cache import built_once
from datasets.paths import cache_root

FOLDER = Path(__file__).with_name("src")
SOURCE = FOLDER / "convnet.cpp"
"""The one file that is compiled; it includes all others of the folder."""
# No -ffast-math: a loss that diverged must stay NaN.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC",
)  # fmt: skip
SUFFIXES = ("f32", "f64")
COMPILE_S = 900.0
"""Seconds after which a compiler counts as hanging."""

_NUMBER, _INDEX, _ADDRESS = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, list[type]]] = {
    "lanes": (_NUMBER, [_NUMBER]),
    "plan_new": (
        _ADDRESS, [_NUMBER, ctypes.POINTER(_INDEX), _NUMBER, _NUMBER, *[ctypes.c_double] * 2],
    ),
}  # fmt: skip
"""Result and arguments of the functions of ``convnet.cpp`` that serve all types of numbers."""
# Each takes a plan and the numbers of tasks, examples and threads; then the arguments below.
_OF_PASSES: dict[str, list[type]] = {
    "features": [_ADDRESS] * 6,
    "outputs": [_ADDRESS] * 6,
    "pull_back": [*[_ADDRESS] * 5, _INDEX, *[_ADDRESS] * 3],
    "along": [*[_ADDRESS] * 8, _INDEX, *[_ADDRESS] * 2],
    "gradient": [_ADDRESS] * 9,
    "hessian_vector": [_ADDRESS] * 7,
}
_SIGNATURES_OF_A_TYPE: dict[str, tuple[type, list[type]]] = {
    "kept_size": (_INDEX, [_ADDRESS, _NUMBER, _NUMBER]),
    "kept_loss_size": (_INDEX, [_ADDRESS, _NUMBER]),
    "injected_size": (_INDEX, [_ADDRESS, _NUMBER]),
    **{name: (_INDEX, [_ADDRESS, *[_NUMBER] * 3, *rest]) for name, rest in _OF_PASSES.items()},
}
"""The same for the functions that exist once for each of `SUFFIXES`."""

_failures: list[str] = []


def failure() -> str:
    """Return why `load` returned None."""
    return _failures[-1] if _failures else "unknown reason"


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it cannot be compiled or loaded."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _failures.append("no C++ compiler ($CXX, g++ or clang++)")
        return None
    try:
        return _from_cache(compiler, cache_root() / "kernels" / f"convnet-{_identity(compiler)}.so")
    except subprocess.CalledProcessError as error:
        _failures.append(f"{compiler}: {error.stderr.strip()[:200] or 'failed'}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        _failures.append(str(error))
    return None


def _from_cache(compiler: str, path: Path) -> ctypes.CDLL:
    """Return the library at ``path``; compile it if the file is missing or damaged."""

    def opened() -> ctypes.CDLL:
        whole.unseal(path.read_bytes())
        return _declare(ctypes.CDLL(str(path)))

    def build() -> None:
        # One process of a host compiles, and says so; the others wait.
        if not path.exists():
            line = "compiling the kernels for this processor: about half a minute, once"
            print(line, file=sys.stderr, flush=True)
        _compile(compiler, path)

    return built_once(path, opened, build, "compiled anew: about half a minute")


def lanes(element_size: int) -> int | None:
    """Return how many elements of ``element_size`` bytes a vector holds; None without kernels."""
    library = load()
    return None if library is None else int(library.lanes(element_size))


def _flags() -> list[str]:
    return [*FLAGS, *os.environ.get("MAML_KERNEL_FLAGS", "").split()]


def _compile(compiler: str, path: Path) -> None:
    """Compile to ``path``, with a digest at its end."""
    with whole.written(path) as building:
        # If the compiler has no OpenMP, compile without: one thread then computes a task.
        for openmp in ("-fopenmp", "-Wno-unknown-pragmas"):
            found = subprocess.run(
                [compiler, *_flags(), openmp, str(SOURCE), "-o", str(building)],
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
            )
            if found.returncode == 0 or not re.search(r"fopenmp|gomp|lomp|\bomp\b", found.stderr):
                break
        found.check_returncode()
        building.write_bytes(whole.seal(building.read_bytes()))


def _identity(compiler: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    flags = ""
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True
    ).stdout
    files = [SOURCE, *sorted(FOLDER.glob("*.h"))]
    sources = [f"{path.name}\n{path.read_text()}" for path in files]
    parts = (*sources, *_flags(), compiler, version, platform.platform(), flags)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    typed = {
        f"{name}_{suffix}": signature
        for name, signature in _SIGNATURES_OF_A_TYPE.items()
        for suffix in SUFFIXES
    }
    for name, (result, arguments) in (_SIGNATURES | typed).items():
        # getattr returns the same function object each time; library[name] makes a new one.
        function = getattr(library, name)
        function.restype, function.argtypes, function.errcheck = result, arguments, _check
    return library


def _check(status: int, *_: object) -> int:
    if status == -1:
        raise MemoryError("no memory for the working buffers of the compiled kernels")
    return status
