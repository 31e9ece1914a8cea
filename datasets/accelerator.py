"""This machine's accelerator, as CUDA's GPUs: the one place that knows its kind.

Torch names it (`torch.accelerator`), so no kind is left out, nor one that torch was told of.
"""

from types import ModuleType

import torch


def kind() -> str | None:
    """Return the kind of the accelerator, as "cuda"; None if none is usable."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def name() -> str | None:
    """Return the name of the accelerator's model; None if none is usable."""
    here = kind()
    return None if here is None else str(torch.get_device_module(here).get_device_name())


def in_use() -> ModuleType | None:
    """Return torch's module of the accelerator if this process uses it, as `torch.cuda`."""
    here = kind()
    module = None if here is None else torch.get_device_module(here)
    return module if module is None or module.is_initialized() else None


def take(device: torch.device) -> None:
    """Let this thread make tensors of no given index on ``device``: a thread begins with 0."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def exactly() -> None:
    """Let torch repeat its results, and compute float32 as such. For a process of the program.

    By its own default, torch computes convolutions on a GPU of NVIDIA in TF32, of 10 bits, by an
    algorithm that may sum in any order.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def identity(device: torch.device) -> str:
    """Return what tells an accelerator of this host from the others, whatever a process sees."""
    facts = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(facts, "uuid", device.index))
