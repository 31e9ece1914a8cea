"""The power iteration of torch's spectral norms, over tasks.

    u ← W v / |W v|,   v ← Wᵀ u / |Wᵀ u|

Torch writes u and v into buffers, which tasks share. Over tasks, each has vectors of its own here,
and the module that assigns them has them until the call ends.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """Return ``F.normalize(…)``; over tasks a new tensor, although torch would write ``out``."""
    over_tasks = torch._C._are_functorch_transforms_active()
    return F.normalize(input, p, dim, eps, None if over_tasks else out)


INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {F.normalize: normalize}
"""What to call in place of torch's function."""
