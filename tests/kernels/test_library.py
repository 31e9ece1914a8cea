"""The cached library is whole, or it is compiled anew."""

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datasets.whole import seal, unseal
from maml.kernels import convnet, library
from maml.networks import stack
from tests.compiler import COMPILER, needs_compiler
from tests.launching import Completed, run, start
from tests.runs import worker_of

pytestmark = needs_compiler

COMPUTE = "from tests.kernels.test_library import computed; print(computed())"


def computed() -> str:
    """Return a hash of this process's kernels' results, or why there are no kernels."""
    if library.load() is None:
        return f"torch: {library.failure()}"
    found = [part[1] for case in stack.CASES for part in stack.results(*case[:2])]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in found)).hexdigest()


@pytest.fixture(scope="module")
def built() -> bytes:
    """The library of this session's cache."""
    assert library.load() is not None
    assert COMPILER is not None
    folder = Path(os.environ["MAML_CACHE"]) / "kernels"
    return unseal((folder / f"convnet-{library._identity(COMPILER)}.so").read_bytes())


class Cache:
    """A new cache, and a fake compiler that only copies the library compiled before."""

    def __init__(self, folder: Path, built: bytes) -> None:
        self.ready, self.log, self.compiler = folder / "ready", folder / "log", folder / "c++"
        self.ready.write_bytes(built)
        self.compiler.write_text(
            f"#!/bin/sh\n[ $1 != --version ] || exec echo 1.0\necho compiled >> {self.log}\n"
            'case "$WITHOUT_OPENMP $*" in 1*-fopenmp*) echo "no -fopenmp here" >&2; exit 1;; esac\n'
            f'for output; do :; done\nsleep ${{SLOW:-0}}\nexec cp {self.ready} "$output"\n'
        )
        self.compiler.chmod(0o755)
        self.env = {"MAML_CACHE": str(folder / "cache"), "CXX": str(self.compiler)}
        name = f"convnet-{library._identity(str(self.compiler))}.so"
        self.path = folder / "cache" / "kernels" / name

    def compute(self, before: str = "", **more: str) -> Completed:
        """Compute something by the kernels in a new process."""
        return run([sys.executable, "-c", before + COMPUTE], 60, env=self.env | more)

    def compiled(self) -> int:
        """How often the compiler ran."""
        return self.log.read_text().count("compiled")

    def files(self) -> list[str]:
        return sorted(p.name for p in self.path.parent.iterdir() if p.suffix != ".lock")


@pytest.fixture
def cache(tmp_path: Path, built: bytes) -> Cache:
    return Cache(tmp_path, built)


def of_another_machine(built: bytes) -> bytes:
    """Return a library with a correct digest, but for another architecture."""
    return seal(built[:18] + b"\xf3" + built[19:])


def damages(whole: bytes) -> Iterator[bytes]:
    """A flipped bit, half the file, an empty file, another machine's, an earlier version's."""
    built = unseal(whole)
    yield whole[:100_000] + bytes([whole[100_000] ^ 4]) + whole[100_001:]
    yield whole[: len(whole) // 2]
    yield b""
    yield of_another_machine(built)
    yield built


EACH = """
import os, sys
from pathlib import Path
from tests.kernels import test_library
path = Path(sys.argv[1])
whole = path.read_bytes()
for damaged in test_library.damages(whole):
    path.write_bytes(damaged)
    child = os.fork()
    if not child:
        print(test_library.computed(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == whole
"""


def test_what_is_damaged_is_compiled_anew(cache: Cache, built: bytes) -> None:
    """One line, no crash, and the results of an undisturbed process bit for bit."""
    cache.path.parent.mkdir(parents=True)
    cache.path.write_bytes(seal(built))
    done = run([sys.executable, "-c", EACH, str(cache.path)], 60, env=cache.env)
    count = len(list(damages(seal(built))))
    assert done.stdout == f"{computed()}\n" * count
    lines = done.stderr.splitlines()
    assert len(lines) == count and all(line.startswith(f"{cache.path}: ") for line in lines)
    assert all(line.endswith("; it is compiled anew: about half a minute") for line in lines)
    assert cache.compiled() == count
    assert cache.files() == [cache.path.name]


def test_a_full_disk_and_what_can_never_be_loaded_leave_it_to_torch(
    cache: Cache, built: bytes
) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    assert cache.compute(full).stdout.startswith("torch: ")
    assert cache.compiled() == 1 and cache.files() == []
    cache.ready.write_bytes(unseal(of_another_machine(built)))
    done = cache.compute()
    assert done.stdout.startswith("torch: ") and len(done.stderr.splitlines()) == 1
    assert cache.compiled() == 2


def test_a_compiler_without_openmp_does(cache: Cache) -> None:
    done = cache.compute(WITHOUT_OPENMP="1")
    assert done.stdout == f"{computed()}\n" and cache.compiled() == 2


def test_processes_that_start_together_compile_once(cache: Cache) -> None:
    """The one that compiles says so."""
    command = [sys.executable, "-c", COMPUTE]
    env = cache.env | {"SLOW": "5"}
    together = [start(command, env=env) for _ in range(3)]
    done = [*(each.wait(60) for each in together), cache.compute()]
    assert {each.stdout for each in done} == {f"{computed()}\n"}
    assert "".join(each.stderr for each in done).count("compiling the kernels for this") == 1
    assert cache.compiled() == 1 and cache.files() == [cache.path.name]


def test_kernels_that_compute_something_else_do_not_serve(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and torch computes."""
    worker = worker_of("maml-glyphs-5way-1shot", filters=16)
    real = convnet.ConvNet.along
    assert worker.learner.obstacle(torch.device("cpu")) is None

    def wrong(*args: Any, **kwargs: Any) -> Any:
        moved, beside, direct = real(*args, **kwargs)
        return moved * 1.05, beside, direct

    capfd.readouterr()
    monkeypatch.setattr(convnet.ConvNet, "along", wrong)
    stack.fault.cache_clear()
    try:
        state = torch.get_rng_state()
        reason = worker.learner.obstacle(torch.device("cpu"))
        assert reason == stack.fault()
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        stack.fault.cache_clear()
    assert "product with the Hessian is off by " in str(reason)
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"warning: {reason} (torch.float64); computing by torch"


def test_who_asks_first_whether_the_kernels_are_right_changes_nothing() -> None:
    """The first call may be within a transform or a mode: a process may only evaluate."""

    def asked(x: torch.Tensor) -> torch.Tensor:
        stack.fault.cache_clear()
        assert stack.fault() is None
        return x

    torch.func.vmap(torch.func.grad(lambda x: asked(x).sum()))(torch.ones(2, 3))
    for mode in (torch.inference_mode(), torch.device("meta")):
        with mode:
            asked(torch.ones(1))
