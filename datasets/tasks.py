"""A task, or a batch of them, as a pytree of tensors.

Shape legend, used by every docstring of this project:

=====  ======================================================
``B``  tasks in a batch (the meta-batch)
``N``  ways: classes in a task
``K``  shots: support examples of a class
``Q``  queries: query examples of a class
``E``  examples of a mini-batch, whatever their class
``C``  image channels, ``H`` height, ``W`` width
=====  ======================================================
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Task(NamedTuple):
    """Support set and query set of ``B`` tasks; without the leading ``B``, of one task.

    A ``NamedTuple`` is a pytree, so ``torch.func.vmap(f)(task)`` maps over the tasks and
    ``Task(*(part[0] for part in task))`` is the first task.

    Images are in class-major order (all examples of class 0, then all of class 1, ...):

    * ``support_x``: ``[B, N*K, C, H, W]`` float in [0, 1]
    * ``support_y``: ``[B, N*K]`` int64 in [0, N)
    * ``query_x``: ``[B, N*Q, C, H, W]`` float in [0, 1]
    * ``query_y``: ``[B, N*Q]`` int64 in [0, N)

    A mini-batch of ordinary classification (:mod:`datasets.batches`) is the query set: E examples
    in place of N*Q, in random order. In training, the support set is empty.

    Regression has one point per example and no classes:

    * ``support_x``, ``support_y``: ``[B, K, 1]`` float
    * ``query_x``, ``query_y``: ``[B, Q, 1]`` float
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor

    def to(self, *where: Any, **options: Any) -> "Task":
        """Return the task on a device or in a dtype, for the arguments of `torch.nn.Module.to`.

        A dtype converts only floating-point and complex tensors. Several inputs are moved, too.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*where, **options)

        def moved(part: Tensor) -> Tensor:
            converts = part.is_floating_point() or part.is_complex()
            return part.to(device, dtype if converts else None, non_blocking)

        return pytree.tree_map_only(Tensor, moved, self)

    def __repr__(self) -> str:
        """Return types and shapes, not the numbers."""
        shown = (pytree.tree_map_only(Tensor, _shape, part) for part in self)
        parts = (f"{name}={part}" for name, part in zip(self._fields, shown, strict=True))
        return f"Task({', '.join(parts)})"


def _shape(part: Tensor) -> str:
    return f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
