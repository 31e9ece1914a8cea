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

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Task(NamedTuple):
    """Support set and query set of ``B`` tasks; without the leading ``B``, of one task: a pytree.

    Images are in class-major order (all examples of class 0, then all of class 1, ...):

    * ``support_x``: ``[B, N*K, C, H, W]`` float in [0, 1]
    * ``support_y``: ``[B, N*K]`` int64 in [0, N)
    * ``query_x``: ``[B, N*Q, C, H, W]`` float in [0, 1]
    * ``query_y``: ``[B, N*Q]`` int64 in [0, N)

    A mini-batch of ordinary classification (:mod:`datasets.batches`) is the query set, of E
    examples in random order. Regression has points: ``[B, K, 1]`` and ``[B, Q, 1]`` float.
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
