"""This machine's accelerator, as CUDA's GPUs: the one place that knows its kind.

Torch names it (`torch.accelerator`), so no kind is left out, nor one that torch was told of. But
random draws have addresses, so we take only what can seed a generator for each device. Apple's
cannot (torch 2.15).
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def kind() -> str | None:
    """Return the kind of the accelerator, as "cuda"; None if none is usable."""
    found = torch.accelerator.current_accelerator(check_available=True)
    seeds = found is not None and hasattr(torch.get_device_module(found), "manual_seed_all")
    return found.type if found is not None and seeds else None


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


def sent(values: Any, device: torch.device) -> Any:
    """Return a nest of tensors on ``device``. Nothing waits: they leave from pinned memory."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_cpu and device.type != "cpu":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    return pytree.tree_map_only(Tensor, moved, values)


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return integers of any shapes on the CPU. One copy brings all, as each waits for a device."""
    if all(tensor.is_cpu for tensor in tensors):
        return list(tensors)
    parts = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    parts = parts.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
