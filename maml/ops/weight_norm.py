"""Weight norm, whose second derivative in torch (2.15) is wrong: ``gradgradcheck`` refuses it.

w = v · g / |v|,   |v|: of each slice along ``dim``, or of all together
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``v`` with the norm ``g``, as ``torch._weight_norm`` does; ``dim`` -1: of all."""
    others = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    norms = torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1) if others else v.abs()
    return v * (g / norms)


INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {torch._weight_norm: weight_norm}
"""What to call in place of torch's function."""
