"""Packed sequences over tasks, which torch would pack task by task.

Torch packs the places of the rows, and one operation takes all rows from there. The lengths are
those of all tasks: where each task has its own, tasks are computed one by one.

Shape legend: T steps, E sequences, N rows of all steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as without_transforms

_OF_TORCH = torch._C._VariableFunctions


def pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the rows ``[N, …]`` of ``input [T, E, …]``, and the sequences ``[T]`` of each step."""
    if not torch._C._are_functorch_transforms_active():
        return _OF_TORCH._pack_padded_sequence(input, lengths, batch_first)
    own = lengths.tolist()  # raises if each task has lengths of its own
    with without_transforms():
        places = torch.arange(input.shape[:2].numel()).view(input.shape[:2])
        rows, sizes = _OF_TORCH._pack_padded_sequence(places, torch.tensor(own), batch_first)
        rows = rows.to(input.device)
    return input.flatten(0, 1).index_select(0, rows), sizes


def pad(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    """Return ``[T, E, …]`` with ``padding`` where ``data [N, …]`` has no row, and the lengths."""
    if not torch._C._are_functorch_transforms_active():
        return _OF_TORCH._pad_packed_sequence(data, sizes, batch_first, padding, total)
    own = sizes.tolist()
    with without_transforms():
        places = torch.arange(1, 1 + sum(own))
        of_rows = _OF_TORCH._pad_packed_sequence(places, torch.tensor(own), batch_first, 0, total)
        places, lengths = of_rows
        rows = places.flatten().to(data.device)
    found = torch.cat([torch.full_like(data[:1], padding), data]).index_select(0, rows)
    return found.unflatten(0, places.shape), lengths


INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    _OF_TORCH._pack_padded_sequence: pack,
    _OF_TORCH._pad_packed_sequence: pad,
}
"""What to call in place of each of torch's functions."""
