"""Which device a process computes on."""

from __future__ import annotations

import torch

from maml.config import Config
from maml.errors import UserError
from maml.processes.world import World


def shares_gpu(config: Config, device: torch.device, world: World) -> bool:
    """Whether another process of this host computes on the same GPU: NCCL refuses that."""
    if device.type != "cuda" or world.local_size == 1:
        return False
    by_number = torch.device(config.device).index is not None if config.device != "auto" else False
    return by_number or world.local_size > torch.cuda.device_count()


def choose_device(config: Config, world: World) -> torch.device:
    """Return the device of ``--device``; raise `UserError` if it is not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: not a device (cpu, cuda, cuda:N or auto)") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"--device {name}: this machine has no usable GPU")
        if device.index is None:
            device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        elif device.index >= torch.cuda.device_count():
            raise UserError(f"--device {name}: there are only {torch.cuda.device_count()} GPUs")
    return device
