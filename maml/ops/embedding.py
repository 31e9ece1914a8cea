"""Embeddings over tasks. There torch applies the padding only to the first task, counts frequencies
over all tasks together, and finds an index that is too large in the rows of another task.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from maml.ops.refused import over_tasks


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, **options: Any
) -> Tensor:
    """Return what ``F.embedding`` returns.

    Raises:
        NotImplementedError: for an option that depends on the rows of all examples.
        IndexError: for an index outside of ``weight``.
    """
    if options.get("scale_grad_by_freq") or options.get("max_norm") is not None:
        raise NotImplementedError("an embedding with scale_grad_by_freq or max_norm, batched")
    _check_rows(input, len(weight))
    rows = F.embedding(input, weight)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _is_recorded() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _check_rows(input: Tensor, n: int) -> None:
    while is_functorch_wrapped_tensor(input):
        input = get_unwrapped(input)
    # While operations are recorded, numbers cannot be read.
    if input.device.type == "cpu" and input.numel() and not _is_recorded():
        low, high = input.aminmax()
        if low < 0 or high >= n:
            raise IndexError("index out of range in self")


INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    F.embedding: over_tasks(F.embedding, embedding)
}
"""What to call in place of torch's function."""
