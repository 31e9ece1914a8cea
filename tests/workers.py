"""Workers in the test's own process, and meta-parameters to differentiate at."""

from typing import Any

import torch

from maml.config.presets import PRESETS, with_values
from maml.params import Params
from maml.worker import Worker


def worker_of(preset: str, **values: Any) -> Worker:
    """Return a worker of a preset on the CPU, in float64; ``values`` are fields of `Config`."""
    config = with_values(PRESETS[preset], **{"dtype": "float64", **values})
    return Worker(config, torch.device("cpu"))


def moved(worker: Worker) -> Params:
    """Return meta-parameters that all differ from how they begin: no one, zero or identity."""
    generator = torch.Generator().manual_seed(5)
    params = {}
    for name, tensor in worker.learner.meta_parameters().items():
        noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        params[name] = tensor.detach() + 0.05 * noise
    return params
