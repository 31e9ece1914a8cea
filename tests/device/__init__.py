"""A pretended accelerator of the tests: see ``device.cpp``. `install` makes it a device of torch.

It stays for the process's life, and torch counts it as the accelerator. So only processes of its
own install it: those of `tests.device.test_device`, and the program by ``python -m tests.device``.
"""

import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.compiler import COMPILER

NAME = "pretended"
SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(__file__).resolve().parents[2] / "build" / "test-device"


def compiled() -> Path:
    """Return the compiled device, which stays in the checkout for later sessions."""
    digest = hashlib.blake2b(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8)
    path = BUILT / f"{digest.hexdigest()}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        building = path.with_suffix(f".{os.getpid()}")
        of_torch = Path(torch.__file__).parent
        headers = [of_torch / "include", of_torch / "include/torch/csrc/api/include"]
        includes = [f"-I{folder}" for folder in headers]
        command = [str(COMPILER), "-std=c++20", "-O1", "-shared", "-fPIC", *includes, str(SOURCE)]
        linked = [f"-L{of_torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, "-o", str(building), *linked], check=True)
        building.rename(path)
    return path


def install() -> None:
    """Make two devices, ``pretended:0`` and ``pretended:1``, and the module ``torch.pretended``.

    With ``$PRETENDED_ALONE``, each process of a host sees one device, another one.
    """
    torch.ops.load_library(compiled())
    torch.utils.rename_privateuse1_backend(NAME)
    ops, devices = torch.ops.pretended, range(1 if "PRETENDED_ALONE" in os.environ else 2)

    def index(device: Any) -> int:
        found = device if isinstance(device, int) else torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: len(devices),
        current_device=torch.accelerator.current_device_index,
        set_device=lambda device: torch.accelerator.set_device_index(index(device)),
        get_device_name=lambda device=None: "a pretended accelerator",
        get_device_properties=lambda device=None: types.SimpleNamespace(uuid=_uuid(index(device))),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed=lambda seed: ops.manual_seed(index(NAME), seed),
        manual_seed_all=lambda seed: [ops.manual_seed(i, seed) for i in devices],
        get_rng_state=lambda device=NAME: ops.get_rng_state(index(device)),
        set_rng_state=lambda state, device=NAME: ops.set_rng_state(index(device), state),
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("pccl", _group, devices=[NAME])


def _uuid(index: int) -> str:
    """Return what tells a host's devices apart."""
    alone = "PRETENDED_ALONE" in os.environ
    return os.environ.get("LOCAL_RANK", "0") if alone else str(index)


def launches() -> int:
    """Return how many operations the device has been given since `forget`."""
    return sum(n for name, n in counts().items() if name.startswith(("aten", "copy on")))


def synchronisations() -> dict[str, int]:
    """Return how often the host has waited for the device since `forget`, by reason."""
    return {name: n for name, n in counts().items() if name.startswith("sync")}


def counts() -> dict[str, int]:
    """Return all that was counted since `forget`."""
    return dict(torch.ops.pretended.counts())


def forget() -> None:
    """Begin to count."""
    torch.ops.pretended.forget()


# ---- collectives with the rules of NCCL

_STREAM = ThreadPoolExecutor(1, "collectives")


class Done(dist._Work):  # type: ignore[misc]
    """A collective that was launched: its stream waits for it, and the host does not."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return whether it was launched."""
        return True


class Group(dist.ProcessGroup):
    """It takes tensors of the device alone, and returns before a collective is done."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        print(f"pccl: rank {rank} of {size}", file=sys.stderr, flush=True)

    def getBackendName(self) -> str:
        """Return the name that it is registered by."""
        return "pccl"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """Sum the tensors of all processes."""
        return self._later(tensors, lambda hosts: self._gloo.allreduce(hosts, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """Send the tensors of one process."""
        return self._later(tensors, lambda hosts: self._gloo.broadcast(hosts, options))

    def _later(self, tensors: list[torch.Tensor], collective: Callable[..., Any]) -> Done:
        if any(tensor.device.type != NAME for tensor in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        ops = torch.ops.pretended
        hosts = [ops.as_host(tensor) for tensor in tensors]
        ops.fly(1)

        def work() -> None:
            collective(hosts).wait()
            ops.fly(-1)

        _STREAM.submit(work)
        return Done()


def _group(store: Any, rank: int, size: int, timeout: Any) -> Group:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("pccl", store), rank, size, timeout)
    return Group(gloo, rank, size)
